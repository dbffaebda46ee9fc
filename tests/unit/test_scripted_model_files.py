"""Scripted models from files, across processes, and models by name."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.activities.providers import ScriptedModel, resolve_model
from perdure.contracts.errors import AuthoringError, ModelUnavailable
from perdure.contracts.messages import (
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    user_message,
)
from perdure.contracts.model import ModelRequest, ModelResponse


class Sink:
    """Lets what streams go."""

    async def text(self, delta: str) -> None: ...

    async def thinking(self, delta: str) -> None: ...


async def ask(
    model: ScriptedModel, text: str, *later: Message, step: int = 1, attempt: int = 1
) -> ModelResponse:
    messages = (user_message(text), *later)
    request = ModelRequest(agent="a", model="m", messages=messages, step=step, attempt=attempt)
    return await model.respond(request, Sink())


def text_of(response: ModelResponse) -> str:
    return "".join(part.text for part in response.parts if isinstance(part, TextPart))


def resolve_scripted(path: Path | str) -> ScriptedModel:
    model = resolve_model(f"scripted:{path}")
    assert isinstance(model, ScriptedModel)
    return model


PROGRAM = """
import asyncio, sys
from perdure.activities.providers import resolve_model
from perdure.contracts.messages import user_message
from perdure.contracts.model import ModelRequest

class Sink:
    async def text(self, delta): pass
    async def thinking(self, delta): pass

request = ModelRequest(agent="a", model="m", messages=(user_message("order 7"),), turn_id="t")
print(asyncio.run(resolve_model("scripted:" + sys.argv[1]).respond(request, Sink())).parts[0].text)
"""


@pytest.mark.slow
async def test_another_process_gives_the_same_reply_and_records_in_the_same_file(tmp_path: Path):
    record, script = tmp_path / "calls.jsonl", tmp_path / "desk.json"
    rules = [{"when": "order (\\d+)", "steps": [{"text": "It is {1}."}]}]
    script.write_text(json.dumps({"record": str(record), "rules": rules}))

    here = text_of(await ask(resolve_scripted(script), "order 7"))
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(script), stdout=subprocess.PIPE
    )
    there = (await other.communicate())[0].decode().strip()

    assert here == there == "It is 7."
    pids = [json.loads(line)["pid"] for line in record.read_text().splitlines()]
    assert len(pids) == len(set(pids)) == 2


SCRIPT = r"""
rules:
  - when: 'refund order (?P<order>\d+)'
    steps:
      - thinking: hm
        text: ["Refunding ", "{order}."]
        calls: [{tool: refund, arguments: {order: "{order:int}"}, id: c1}]
        usage: {input_tokens: 3}
      - text: "Done: {results}"
    repeat: true
  - steps:
      - attempts:
          - {error: {kind: unavailable, message: busy, retry_after_s: 0.5}}
          - {text: Hello.}
"""


async def test_a_yaml_file_is_a_whole_model(tmp_path: Path):
    path = tmp_path / "desk.yaml"
    path.write_text(SCRIPT)
    result = ToolResultPart(call_id="", name="refund", text="ok")

    model = ScriptedModel.from_file(path)
    first = await ask(model, "refund order 2")
    second = await ask(
        model,
        "refund order 2",
        Message(role=Role.ASSISTANT, parts=first.parts),
        Message(role=Role.TOOL, parts=(result,)),
        step=2,
    )

    assert model.name == first.model == f"scripted:{path}"
    assert first.usage.input_tokens == 3
    assert first.parts == (
        ThinkingPart(text="hm"),
        TextPart(text="Refunding 2."),
        ToolCallPart(name="refund", provider_call_id="c1", arguments={"order": 2}),
    )
    assert text_of(second) == "Done: ok"
    with pytest.raises(ModelUnavailable, match="busy"):
        await ask(model, "hi")
    assert text_of(await ask(model, "hi", attempt=2)) == "Hello."


async def test_a_path_is_taken_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "desk.yml").write_text("rules: [{steps: [{text: here}]}]")
    monkeypatch.chdir(tmp_path)

    model = resolve_scripted("desk.yml")

    assert model.name == "scripted:desk.yml"
    assert text_of(await ask(model, "x")) == "here"


async def test_a_package_may_hold_the_file_and_a_file_of_that_path_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "site" / "desk_package" / "inner"
    (package / "scripts").mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "scripts" / "desk.yaml").write_text("rules: [{steps: [{text: packaged}]}]")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    spec = "desk_package.inner/scripts/desk.yaml"

    packaged = text_of(await ask(resolve_scripted(spec), "x"))
    local = tmp_path / spec
    local.parent.mkdir(parents=True)
    local.write_text("rules: [{steps: [{text: local}]}]")

    assert packaged == "packaged"
    assert text_of(await ask(resolve_scripted(spec), "x")) == "local"


@pytest.mark.parametrize(
    "path", ["missing.yaml", "no_such_package.x/a.yaml", "../a.yaml", "json/a.yaml", "json.x/a", ""]
)
def test_a_missing_file_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(AuthoringError) as caught:
        resolve_model(f"scripted:{path}")

    assert f"script {path!r} cannot be read" in str(caught.value)


def test_an_empty_file_is_a_model_that_must_not_be_called(tmp_path: Path):
    (tmp_path / "empty.yaml").touch()

    assert resolve_scripted(tmp_path / "empty.yaml").requests == []


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.yaml", "rules: [", "cannot be parsed"),
        ("a.json", "rules: []", "cannot be parsed"),
        ("a.yaml", b"\xff\xfe\xff", "not UTF-8"),
        ("a.yaml", "- 1", "the script: Input should be a valid dictionary"),
        ("a.yaml", "rule: []", "rule: Extra inputs are not permitted"),
        ("a.yaml", "rules: [{steps: []}]", "rules.0.steps"),
        ("a.yaml", "rules: [{steps: [{txt: x}]}]", "rules.0.steps.0.txt: Extra inputs"),
        ("a.yaml", "rules: [{steps: [{attempts: []}]}]", "rules.0.steps.0.attempts: "),
        ("a.yaml", "rules: [{steps: [{text: 5}]}]", "rules.0.steps.0.text"),
        ("a.yaml", "rules: [{steps: [5]}]", "rules.0.steps.0: "),
        ("a.yaml", "rules: [{when: '(', steps: [{text: x}]}]", "`when` is no regular expression"),
        ("a.yaml", "rules: [{steps: [{delay_s: -1}]}]", "delay_s"),
        ("a.yaml", "rules: [{steps: [{error: {kind: x}}]}]", "error.kind"),
        (
            "a.yaml",
            "rules: [{steps: [{error: {kind: refused}, calls: [{tool: x}]}]}]",
            "a reply with an error has no calls",
        ),
        (
            "a.yaml",
            "rules: [{steps: [{calls: [{tool: x, arguments: {day: 2024-01-01}}]}]}]",
            "calls.0.arguments",
        ),
        (
            "a.yaml",
            "rules: [{steps: [{calls: [{tool: x, arguments: {n: .nan}}]}]}]",
            "calls.0.arguments",
        ),
    ],
)
def test_a_bad_file_says_where_it_is_wrong(
    tmp_path: Path, name: str, content: str | bytes, reason: str
):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)

    with pytest.raises(AuthoringError) as caught:
        ScriptedModel.from_file(path)

    assert reason in str(caught.value)


@pytest.mark.parametrize("spec", ["", "desk.yaml", "nope:gpt", ":x", "Scripted:x.yaml"])
def test_an_unknown_provider_is_refused_and_the_known_are_named(spec: str):
    with pytest.raises(AuthoringError, match="there is: scripted:"):
        resolve_model(spec)


@pytest.mark.slow
def test_naming_the_room_of_providers_loads_none():
    program = (
        "import sys, perdure.activities.providers\n"
        "sys.exit('yaml' in sys.modules or 'perdure.activities.providers.scripted' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
