"""The documents say what is there: their code runs, and every command, variable and code exists.

Both ways where a list is meant to be complete. Nothing is started and no server is needed.
"""

import ast
import asyncio
import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from perdure import App
from perdure.activities.providers.scripted import ScriptedModel
from perdure.cli.main import cli
from perdure.contracts import errors, limits
from perdure.contracts.calls import FIXED_CONTRACTS
from perdure.contracts.errors import PerdureError
from perdure.contracts.events import LedgerEvent
from perdure.contracts.messages import user_message
from perdure.contracts.model import ModelRequest
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.contracts.turn import (
    StopReason,
    TurnLimits,
    TurnRequest,
    TurnResult,
    parse_turn_request,
)
from perdure.settings import Settings
from perdure.stores.tables import METADATA

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README, ARCHITECTURE, SAFETY, INTERFACES, CONFIGURATION = (
    (ROOT / name).read_text("utf-8")
    for name in (
        "README.md",
        "docs/architecture.md",
        "docs/replay-safety.md",
        "docs/interfaces.md",
        "docs/configuration.md",
    )
)

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|`|: )perdure ([a-z].*?)(?:`|  +#|$)", re.MULTILINE)
VARIABLE = re.compile(r"\b(?:PERDURE|TEMPORAL)_[A-Z_]+\b")
CODE_SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([\w-]+))?\)")
# The columns of the tables whose first cell holds codes.
FIRST_CELL = re.compile(r"^\| (`[^|]+) \|", re.MULTILINE)
CODES_OUTSIDE_THE_TREE = {"invalid_arguments"}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [textwrap.dedent(body) for found, body in FENCE.findall(text) if found == language]


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def error_codes() -> set[str]:
    """The code of every class of the one tree."""

    def tree(base: type[PerdureError]) -> Iterator[type[PerdureError]]:
        yield base
        for child in base.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from tree(child)

    return {error.code for error in tree(PerdureError)}


def first_cells(text: str) -> set[str]:
    """All code spans in the first cells of a text's tables."""
    return {span for cell in FIRST_CELL.findall(text) for span in CODE_SPAN.findall(cell)}


def test_the_agent_of_the_readme_is_an_app_whose_model_and_tools_work() -> None:
    (source,) = [block for block in blocks(README, "python") if block.startswith("# desk.py")]
    desk: dict[str, Any] = {"__name__": "desk"}

    exec(compile(source, "README.md", "exec", dont_inherit=True), desk)

    app = desk["app"]
    assert isinstance(app, App)
    agent = app.agent("desk")
    assert isinstance(agent.model, ScriptedModel)
    asked = ModelRequest(
        agent="desk", model="scripted", messages=(user_message("What about order 1?"),)
    )
    answer = asyncio.run(agent.model.respond(asked, _NoSink()))
    (called,) = [part for part in answer.parts if part.type == "tool_call"]
    tool = agent.tool(called.name)
    assert tool is not None
    tool.validate_arguments(called.arguments)
    assert asyncio.run(tool(**called.arguments)) == "order 1 is paid"


class _NoSink:
    async def text(self, delta: str) -> None: ...

    async def thinking(self, delta: str) -> None: ...


def test_the_agent_of_the_readme_has_about_twenty_lines() -> None:
    (source,) = [block for block in blocks(README, "python") if block.startswith("# desk.py")]

    assert len([line for line in source.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_documents_can_be_compiled_and_its_imports_exist(page: Path) -> None:
    for block in blocks(page.read_text("utf-8"), "python"):
        tree = compile(block, str(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert missing == [], f"{page.name}: {node.module} lacks {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_command_and_option_exists(page: Path) -> None:
    for line in COMMAND.findall(page.read_text("utf-8")):
        command: Any = get_command(cli)
        words = line.split()
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"{page.name}: perdure {line}"
            command = command.commands[words.pop(0)]
        options = {option for param in command.params for option in param.opts}
        used = {word for word in words if word.startswith("--")}
        assert used <= options, f"{page.name}: perdure {line}"


def test_every_command_of_the_program_is_documented() -> None:
    program: Any = get_command(cli)
    texts = "\n".join(page.read_text("utf-8") for page in PAGES)

    assert [name for name in program.commands if f"perdure {name}" not in texts] == []


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) == {"demo", "test"} & targets


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(PERDURE_\w+)` \| `([^`]+)` \|", CONFIGURATION, re.MULTILINE))

    expected: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = ("off", "on")[default] if isinstance(default, bool) else f"{default}"
        expected[f"PERDURE_{name.upper()}"] = shown.removesuffix(".0")
    assert rows == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_variable_is_read_somewhere(page: Path) -> None:
    sources = "\n".join(
        path.read_text("utf-8")
        for room in ("contracts", "examples", "cli", "tests")
        for path in (ROOT / room).rglob("*.py")
        if path != Path(__file__)
    )
    settings = {f"PERDURE_{name.upper()}" for name in Settings.model_fields}
    temporals = {"TEMPORAL_NAMESPACE", "TEMPORAL_PROFILE", "TEMPORAL_API_KEY", "TEMPORAL_TLS"}
    known = settings | temporals | set(VARIABLE.findall(sources + (ROOT / "Makefile").read_text()))

    assert set(VARIABLE.findall(page.read_text("utf-8"))) <= known


def test_the_table_of_error_codes_is_the_tree_of_errors() -> None:
    documented = first_cells(section(INTERFACES, "Errors"))

    assert documented == error_codes() | CODES_OUTSIDE_THE_TREE


def test_every_stop_reason_is_documented() -> None:
    text = section(INTERFACES, "The result")

    assert [reason for reason in StopReason if f"`{reason}`" not in text] == []


def test_the_fields_of_request_and_result_are_documented() -> None:
    assert first_cells(section(INTERFACES, "Starting a turn")) == set(TurnRequest.model_fields)
    assert set(TurnResult.model_fields) <= first_cells(section(INTERFACES, "The result"))


@pytest.mark.parametrize("text", [README, INTERFACES], ids=["README", "interfaces"])
def test_the_documented_requests_are_accepted(text: str) -> None:
    requests = [block for block in blocks(text, "json") if '"request_id"' in block]
    requests += re.findall(r"--input \\\n\s*'(\{.*\})'", text)

    assert requests
    for request in requests:
        parse_turn_request(json.loads(request))


def test_the_documented_result_has_the_fields_of_a_result() -> None:
    (example,) = [block for block in blocks(README, "json") if '"stop_reason"' in block]

    shown = json.loads(example)
    assert set(shown) == set(TurnResult.model_fields) - {"answer_at", "output"}
    TurnResult.model_validate(shown)


def test_statuses_and_reasons_of_results_are_documented() -> None:
    text = section(SAFETY, "What the model is told")

    assert first_cells(text) == set(ResultStatus)
    assert [reason for reason in ResultReason if f"`{reason}`" not in text] == []


def test_the_events_and_tables_of_the_ledger_are_documented() -> None:
    text = section(ARCHITECTURE, "The ledger")
    kinds = {member.model_fields["kind"].default for member in LedgerEvent.__args__[0].__args__}

    spans = first_cells(text)
    assert kinds <= spans
    assert set(METADATA.tables) <= spans
    assert spans <= kinds | set(METADATA.tables)


def test_the_activities_are_documented() -> None:
    names = {contract.name for contract in FIXED_CONTRACTS}

    documented = first_cells(section(INTERFACES, "Activities"))
    assert documented == names | {"<agent>.<tool>", "<agent>.<tool>:reconcile"}


def test_the_table_of_rooms_is_the_one_that_a_test_holds() -> None:
    source = (ROOT / "tests/unit/test_architecture.py").read_text("utf-8")
    (table,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ROOMS"
    ]
    assert table is not None
    # An empty set is a call, which no literal is.
    arrows = ast.literal_eval(ast.unparse(table).replace("set()", "[]"))

    rows = re.findall(r"^\| `(\w+)[/.]\w*` \| [^|]+ \| ([^|]*)\|", README, re.MULTILINE)

    documented = {room: {name for name in re.split(r"[,\s]+", cell) if name} for room, cell in rows}
    assert documented == {
        room: set(allowed) - {""} for room, allowed in arrows.items() if room != ""
    }


def test_the_numbers_of_the_readme_are_the_limits() -> None:
    text = " ".join(section(README, "Limits of this version").split())

    assert limits.MESSAGE_BYTES_MAX == limits.ARGUMENTS_BYTES_MAX == 256 * limits.KIB
    assert f"may hold {limits.WINDOW_MESSAGES_MAX:,} messages" in text
    assert f"{limits.CALLS_PER_STEP_MAX} calls a step" in text
    assert f"{TurnLimits().model_steps_max} steps a turn" in text
    assert f"up to {limits.MODEL_STEPS_MAX:,}" in text
    assert limits.TOOL_TEXT_BYTES_MAX == 50 * limits.KIB
    assert f"{limits.TOOL_TEXT_LINES_MAX:,} lines" in text
    assert limits.TOOL_RESULT_BYTES_MAX == 16 * limits.MIB


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
