"""The arrows between the rooms (DESIGN 3): who may import whom, and what from outside.

Imports are read from the source, so a lazy import in a function and one for type checkers count as
well. What is loaded in the end is asked of fresh interpreters.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A room may import itself and these. "" is the package's own surface, which loads lazily; the
# command line may look into everything that it starts.
ROOMS: dict[str, set[str]] = {
    "": {"agents", "contracts"},
    "contracts": set(),
    "agents": {"contracts"},
    "stores": {"contracts"},
    "workflows": {"contracts"},
    "activities": {"contracts", "agents", "stores", "logs"},
    "logs": set(),
    "settings": {"contracts", "logs"},
    "worker": {"contracts", "agents", "stores", "workflows", "activities", "settings", "logs"},
    "client": {"contracts"},
    "cli": {"contracts", "client", "stores", "worker", "examples", "agents", "settings", "logs"},
    "examples": {"", "contracts", "agents", "client"},
    "testing": {
        "contracts",
        "agents",
        "stores",
        "workflows",
        "activities",
        "settings",
        "worker",
        "client",
        "cli",
    },
}

# Models are spoken to in `activities/providers` only; these are imported when one is asked for.
PROVIDER_LIBRARIES = {"pydantic_ai", "openai", "anthropic", "httpx", "httpx2"}

# SQL is spoken in the stores only, Temporal where workflows, activities and their callers are.
LIBRARIES: dict[str, set[str]] = {
    "": set(),
    "contracts": {"pydantic", "pydantic_core"},
    "agents": {"pydantic", "pydantic_core"},
    "stores": {"pydantic", "pydantic_core", "sqlmodel", "sqlalchemy", "alembic"},
    "workflows": {"pydantic", "temporalio"},
    "activities": {
        *("pydantic", "pydantic_core", "temporalio", "yaml", "opentelemetry", "prometheus_client"),
        *PROVIDER_LIBRARIES,
    },
    "logs": set(),
    "settings": {"pydantic", "pydantic_settings", "temporalio"},
    "worker": {"pydantic", "temporalio"},
    "client": {"pydantic", "temporalio"},
    "cli": {"pydantic", "temporalio", "typer", "click", "rich"},
    "examples": {"pydantic"},
    "testing": {"pytest", "temporalio"},
}

# Workflow code must come to the same decisions again: no I/O, no clock, no chance (DESIGN 3).
UNSAFE_IN_WORKFLOWS = {
    *("http", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil", "signal"),
    *("socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time"),
    *("urllib", "uuid"),
}
UNSAFE_IN_CLIENT = {"sqlite3"}


class Import(NamedTuple):
    """One imported module, `perdure.<room>...` resolved as far as its name tells."""

    line: int
    module: str
    name: str = ""


def imports_of(source: str) -> Iterator[Import]:
    """Every import of a source text; a relative one begins with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.lineno, "." * node.level + (node.module or ""), alias.name)


def room_of(found: Import) -> str | None:
    """The room of ours that is imported, "" for the surface, None for a foreign module."""
    parts = found.module.split(".")
    if parts[0] != "perdure":
        return None
    if len(parts) > 1:
        return parts[1]
    if found.name in ROOMS:
        return found.name
    return "contracts" if found.name == "errors" else ""


def broken_arrows(room: str, source: str) -> list[str]:
    """What is wrong with the imports of a file in that room, as `line: error`."""
    errors: list[str] = []
    for found in imports_of(source):
        target, top = room_of(found), found.module.split(".")[0]
        if found.module.startswith("."):
            errors.append(f"{found.line}: a relative import; write perdure.<room>")
        elif target is not None:
            if target != room and target not in ROOMS[room] and found.name != "__version__":
                errors.append(f"{found.line}: {room or 'perdure'} must not import {target or top}")
        elif top in ROOMS:
            errors.append(f"{found.line}: import {top} as perdure.{top}")
        elif top not in sys.stdlib_module_names and top not in LIBRARIES[room]:
            errors.append(f"{found.line}: {room or 'perdure'} must not import the library {top}")
        elif room == "workflows" and top in UNSAFE_IN_WORKFLOWS:
            errors.append(f"{found.line}: workflows must not import {top}: not deterministic")
        elif room == "client" and top in UNSAFE_IN_CLIENT:
            errors.append(f"{found.line}: client must not import {top}")
    return errors


def files_of(room: str) -> list[Path]:
    """The files of a room, which is a folder or a single file of the root."""
    if (ROOT / room).is_dir() and room:
        return sorted((ROOT / room).rglob("*.py"))
    path = ROOT / f"{room or '__init__'}.py"
    return [path] if path.exists() else []


def modules_of(room: str) -> list[str]:
    """The importable names of a room's modules, without migrations, which are run, not imported."""
    names: list[str] = []
    for path in files_of(room):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "migrations" not in parts:
            names.append(".".join(("perdure", *parts)).removesuffix(".__init__"))
    return names


def loaded_by(modules: list[str]) -> set[str]:
    """What a fresh interpreter has loaded after importing the modules."""
    program = f"import sys, {', '.join(modules)}\nprint('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def loads(loaded: set[str], unwanted: str) -> list[str]:
    """Those of the unwanted modules, separated by spaces, that are loaded."""
    return [name for name in unwanted.split() if name in loaded]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_arrows_allow(room: str) -> None:
    errors = [
        f"{path.relative_to(ROOT)}:{error}"
        for path in files_of(room)
        for error in broken_arrows(room, path.read_text())
    ]

    assert not errors, "\n" + "\n".join(errors)


def test_every_room_of_the_repository_has_a_row_in_the_tables() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}

    assert folders | files | {""} == set(ROOMS)
    assert set(LIBRARIES) == set(ROOMS)


def test_the_arrows_have_no_cycle() -> None:
    # The surface and its examples name each other by design: both load lazily.
    open_rooms = {room: arrows - {room, ""} for room, arrows in ROOMS.items() if room}

    while leaves := {room for room, arrows in open_rooms.items() if not arrows}:
        open_rooms = {room: arrows - leaves for room, arrows in open_rooms.items() if arrows}

    assert not open_rooms


def test_the_client_loads_no_sql_library_no_store_and_no_activity() -> None:
    loaded = loaded_by(modules_of("client"))

    unwanted = (
        "sqlmodel sqlalchemy alembic sqlite3 perdure.stores perdure.activities perdure.agents"
    )
    assert loads(loaded, unwanted) == []


def test_the_workflows_load_nothing_that_does_io() -> None:
    loaded = loaded_by(modules_of("workflows"))

    unwanted = "sqlmodel sqlalchemy sqlite3 httpx yaml perdure.stores perdure.activities"
    assert loads(loaded, unwanted + " perdure.agents perdure.client perdure.worker") == []


def test_the_contracts_load_nothing_of_temporal_or_of_other_rooms() -> None:
    loaded = loaded_by(modules_of("contracts"))

    others = " ".join(f"perdure.{room}" for room in ROOMS if room not in ("", "contracts"))
    assert loads(loaded, "temporalio sqlmodel sqlalchemy " + others) == []


def test_the_agents_load_no_temporal_and_no_sql() -> None:
    loaded = loaded_by(modules_of("agents"))

    assert loads(loaded, "temporalio sqlmodel sqlalchemy perdure.stores perdure.activities") == []


def test_naming_the_pytest_plugin_loads_nothing_of_ours_but_itself() -> None:
    loaded = loaded_by(["perdure.testing", "perdure.testing.plugin"])

    assert loads(loaded, "temporalio sqlmodel sqlalchemy pydantic perdure.agents perdure.cli") == []


@pytest.mark.parametrize(
    ("room", "source", "error"),
    [
        ("contracts", "import temporalio.workflow", "must not import the library temporalio"),
        ("contracts", "from perdure.stores.ledger import x", "must not import stores"),
        ("contracts", "from .ids import TurnKey", "a relative import"),
        ("contracts", "from perdure import stores", "must not import stores"),
        ("contracts", "from perdure import App", "must not import perdure"),
        ("contracts", "import perdure", "must not import perdure"),
        ("contracts", "from contracts import ids", "import contracts as perdure.contracts"),
        (
            "workflows",
            "def f():\n    import perdure.activities.model",
            "must not import activities",
        ),
        ("workflows", "if TYPE_CHECKING:\n    from sqlmodel import Session", "library sqlmodel"),
        ("workflows", "from time import time", "not deterministic"),
        ("workflows", "import os.path", "not deterministic"),
        ("activities", "from sqlalchemy import text", "must not import the library sqlalchemy"),
        ("client", "import sqlite3", "client must not import sqlite3"),
        ("client", "from perdure import stores", "must not import stores"),
        ("stores", "from perdure.agents import Agent", "must not import agents"),
        ("agents", "import perdure.workflows.turn", "must not import workflows"),
        ("cli", "from perdure.workflows import turn", "must not import workflows"),
    ],
)
def test_the_check_finds_a_broken_arrow(room: str, source: str, error: str) -> None:
    found = broken_arrows(room, source)

    assert len(found) == 1
    assert error in found[0]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("contracts", "import json\nfrom pydantic import BaseModel\nimport perdure.contracts.ids"),
        ("workflows", "from temporalio import workflow\nfrom datetime import timedelta"),
        ("activities", "from perdure.stores.ledger import x\nfrom perdure import errors"),
        ("worker", "import perdure.workflows.turn, perdure.activities.model"),
        ("cli", "from perdure import __version__\nimport perdure.examples.order_desk"),
        ("examples", "from perdure import App, Agent, tool"),
        ("", "from perdure.agents import App"),
    ],
)
def test_the_check_lets_an_allowed_import_pass(room: str, source: str) -> None:
    assert broken_arrows(room, source) == []


def test_the_check_of_loaded_modules_finds_what_is_there() -> None:
    assert loads(loaded_by(["json", "perdure.contracts.ids"]), "pydantic yaml") == ["pydantic"]
