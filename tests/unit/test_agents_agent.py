"""Agents and apps: what is checked when they are declared, and how an app is found."""

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.agents import Agent, App, ReplaySafety, load_app, tool
from perdure.contracts.errors import AppNotImportable, AuthoringError, UnknownAgent
from perdure.contracts.limits import INSTRUCTIONS_BYTES_MAX, TOOLS_PER_TURN_MAX
from perdure.contracts.model import ModelRequest, ModelResponse, ModelSink


class Echo:
    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        return ModelResponse()


@tool
def look(query: str) -> str:
    return query


@tool(replay=ReplaySafety.SAFE)
def again(query: str) -> str:
    return query


def test_an_agent_keeps_what_it_was_given():
    agent = Agent("order-desk", "scripted:x.yaml", "Be kind.", [look, again], model_timeout_s=5)

    assert (agent.name, agent.model, agent.instructions) == (
        "order-desk", "scripted:x.yaml", "Be kind.",
    )  # fmt: skip
    assert agent.tools == (look, again)
    assert agent.model_timeout_s == 5
    assert agent.model_parameters == {}
    assert repr(agent) == "Agent('order-desk', model='scripted:x.yaml')"


def test_tools_are_found_by_name_and_described_in_declared_order():
    agent = Agent("a", Echo(), tools=[look, again])

    assert agent.tool("again") is again
    assert agent.tool("missing") is None
    assert [spec.name for spec in agent.specs()] == ["look", "again"]
    assert [spec.name for spec in agent.specs(["again", "look", "missing"])] == ["look", "again"]
    assert agent.specs([]) == ()


def test_a_model_is_named_by_its_string_its_name_or_its_class():
    named = Echo()
    named.name = "echo:1"  # type: ignore[attr-defined]

    assert Agent("a", "scripted:x").model_name == "scripted:x"
    assert Agent("a", Echo()).model_name == "Echo"
    assert Agent("a", named).model_name == "echo:1"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 129, "a\n", None])
def test_an_agent_name_outside_the_alphabet_is_refused(name: Any):
    with pytest.raises(AuthoringError, match="its name"):
        Agent(name, Echo())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (" ", "empty string"),
        (Echo, "the class Echo, not an object"),
        (object(), "has no `respond"),
        (None, "a NoneType"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, reason: str):
    with pytest.raises(AuthoringError, match=reason):
        Agent("a", model)


def test_a_plain_function_among_the_tools_is_refused():
    def plain() -> None: ...

    with pytest.raises(AuthoringError, match="'plain' is not a tool; decorate it with @tool"):
        Agent("a", Echo(), tools=[plain])  # type: ignore[list-item]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(AuthoringError, match="two tools have the name 'look'"):
        Agent("a", Echo(), tools=[look, look])


def test_a_reconciled_tool_without_its_function_is_refused_with_the_agent():
    @tool(replay=ReplaySafety.RECONCILED)
    def charge() -> None: ...

    with pytest.raises(AuthoringError, match="'charge' is RECONCILED and has no reconcile"):
        Agent("a", Echo(), tools=[charge])

    charge.reconcile(lambda: None)
    assert Agent("a", Echo(), tools=[charge]).tools == (charge,)


@pytest.mark.slow
def test_more_tools_than_a_turn_takes_are_refused():
    tools = [tool(name=f"t{number}")(lambda: None) for number in range(TOOLS_PER_TURN_MAX + 1)]

    with pytest.raises(AuthoringError, match="513 tools, at most 512"):
        Agent("a", Echo(), tools=tools)
    assert len(Agent("a", Echo(), tools=tools[:-1]).tools) == TOOLS_PER_TURN_MAX


def test_instructions_are_bounded_by_encoded_bytes():
    fits = "x" * (INSTRUCTIONS_BYTES_MAX - 2)

    assert Agent("a", Echo(), fits).instructions == fits
    with pytest.raises(AuthoringError, match="encoded bytes"):
        Agent("a", Echo(), fits[:-1] + "\n")


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_model_timeout_must_be_a_time(timeout_s: float):
    with pytest.raises(AuthoringError, match="model_timeout_s"):
        Agent("a", Echo(), model_timeout_s=timeout_s)


@pytest.mark.parametrize("value", [object(), float("nan"), {1}])
def test_model_parameters_must_be_json(value: Any):
    with pytest.raises(AuthoringError, match="model_parameters are not JSON"):
        Agent("a", Echo(), model_parameters={"temperature": value})


def test_model_parameters_are_a_copy():
    parameters = {"temperature": 0}

    agent = Agent("a", Echo(), model_parameters=parameters)
    parameters["temperature"] = 1

    assert agent.model_parameters == {"temperature": 0}


def test_the_public_package_has_the_authoring_words():
    assert perdure.Agent is Agent
    assert perdure.App is App
    assert perdure.tool is tool


def test_an_app_knows_its_agents_by_name():
    one, other = Agent("one", Echo()), Agent("other", Echo())

    app = App(agents=[one, other])

    assert app.agents == {"one": one, "other": other}
    assert app.agent("other") is other


def test_an_unknown_agent_is_named_beside_the_known_ones():
    app = App([Agent("one", Echo()), Agent("other", Echo())])

    with pytest.raises(UnknownAgent, match="no agent 'third'; this app has: one, other"):
        app.agent("third")


def test_two_agents_of_one_name_are_refused():
    with pytest.raises(AuthoringError, match="two agents have the name 'one'"):
        App([Agent("one", Echo()), Agent("one", Echo())])


def test_an_app_takes_only_agents():
    with pytest.raises(AuthoringError, match="not a str"):
        App(["one"])  # type: ignore[list-item]


async def test_the_lifespan_gets_the_app_and_yields_the_dependencies():
    seen: list[Any] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[str]:
        seen.append(app)
        yield "pool"
        seen.append("closed")

    app = App([], lifespan=lifespan)

    async with app.dependencies() as deps:
        assert deps == "pool"
    assert seen == [app, "closed"]


async def test_an_app_without_a_lifespan_has_no_dependencies():
    async with App([]).dependencies() as deps:
        assert deps is None


def test_a_lifespan_that_was_not_decorated_is_refused():
    async def lifespan(app: App) -> AsyncIterator[None]:
        yield

    with pytest.raises(AuthoringError, match="asynccontextmanager"):
        App([], lifespan=lifespan)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is not on the import path; imports are undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_an_app_beside_the_command_is_loaded(folder: Path):
    (folder / "desk_one.py").write_text(
        "from perdure import App\nclass Apps:\n    app = App(agents=[])\napp = Apps.app\n"
    )

    assert isinstance(load_app("desk_one:app"), App)
    assert load_app("desk_one:Apps.app") is load_app("desk_one:app")
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("desk_two", "name the app as"),
        (":app", "name the app as"),
        ("desk_two:", "name the app as"),
        ("desk_missing:app", "No module named 'desk_missing'"),
        ("desk_two:missing", "the module has no 'missing'"),
        ("desk_two:number", "is a int, not a perdure.App"),
        ("desk_broken:app", "cannot import 'desk_broken': ZeroDivisionError"),
        (".relative:app", "cannot import '.relative'"),
    ],
)
def test_an_app_that_cannot_be_loaded_says_why(folder: Path, path: str, reason: str):
    (folder / "desk_two.py").write_text("number = 1\n")
    (folder / "desk_broken.py").write_text("1 / 0\n")

    with pytest.raises(AppNotImportable) as caught:
        load_app(path)

    assert reason in str(caught.value)


def test_a_mistake_in_the_app_is_reported_as_itself(folder: Path):
    (folder / "desk_wrong.py").write_text(
        "from perdure import Agent\nagent = Agent('a b', 'scripted:x')\n"
    )

    with pytest.raises(AuthoringError, match="agent 'a b'"):
        load_app("desk_wrong:app")
