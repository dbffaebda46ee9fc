"""`perdure.testing` as its users have it: fixtures, workers to kill, readable failures."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import effect_counts
from temporalio.client import Client, WorkflowExecutionStatus

from perdure import Agent, App, ReplaySafety, tool
from perdure.contracts.errors import AuthoringError, InvalidRequest, SetupError, UnknownAgent
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store
from perdure.testing import Hold, ScriptedModel, Stage, WorkerProcess, call, until, with_model

pytest_plugins = ["perdure.testing"]
pytestmark = [pytest.mark.server, pytest.mark.slow]

FAULT_APP = "fault_app:app"


@tool(replay=ReplaySafety.SAFE)
async def look(what: str) -> str:
    """Look something up."""
    return f"{what} is there"


ANSWERING = ScriptedModel.replies([call("look", what="it")], "I see: {results}")
APP = App([Agent("desk", ANSWERING, "Look.", [look])])


def worker(stage: Stage, hold: Hold | None = None) -> WorkerProcess:
    """A worker process of the app whose effects can be counted."""
    return stage.worker_process(FAULT_APP, hold=hold, PERDURE_FAULT_DIR=str(stage.folder))


async def test_a_turn_is_asked_for_and_its_ledger_looked_at(perdure_stage: Stage) -> None:
    async with perdure_stage.worker(APP):
        turn = await perdure_stage.ask("desk", "Look!", conversation_id="c1")

    assert turn.result is not None
    assert (turn.result.status, turn.result.answer) == ("completed", "I see: it is there")
    assert (turn.status, turn.stop_reason) == ("completed", "answered")
    assert turn.answer == "I see: it is there"
    assert (turn.operation("look").status, turn.operation("look").text) == ("ok", "it is there")
    assert len(turn.operations[0].generations) == 1
    roles = [message.role.value for message in turn.transcript]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert turn.events[-1].kind == "turn_ended"


async def test_the_fixture_for_a_worker_is_the_stages(perdure_stage: Stage, perdure_worker) -> None:
    async with perdure_worker(APP):
        turn = await perdure_stage.ask("desk", "Look!")

    assert turn.status == "completed"


async def test_a_call_that_there_was_not_is_told_with_those_there_were(
    perdure_stage: Stage,
) -> None:
    async with perdure_stage.worker(APP):
        turn = await perdure_stage.ask("desk", "Look!")

    with pytest.raises(AssertionError, match="called 'send' 0 times; it called: look"):
        turn.operation("send")


async def test_a_request_of_the_wrong_shape_is_refused(perdure_stage: Stage) -> None:
    with pytest.raises(InvalidRequest):
        await perdure_stage.start("desk", "Look!", unknown=1)


async def test_a_refused_turn_raises_its_refusal(perdure_stage: Stage) -> None:
    async with perdure_stage.worker(APP):
        with pytest.raises(UnknownAgent, match="nobody"):
            await perdure_stage.ask("nobody", "Look!")


async def test_a_turn_that_no_worker_takes_says_so(perdure_stage: Stage) -> None:
    turn = await perdure_stage.start("desk", "Look!")

    with pytest.raises(TimeoutError, match="is not opened: does a worker run"):
        await turn.wait(0.3)
    assert turn.status is None
    with pytest.raises(AssertionError, match="does not know"):
        _ = turn.answer


async def test_a_turn_is_cancelled(perdure_stage: Stage) -> None:
    async with worker(perdure_stage, Hold.IN_EFFECT) as holding:
        turn = await perdure_stage.start("fault", "use send")
        await holding.held()
        await turn.cancel()
        holding.go_on()
        await turn.wait()

    assert turn.status == "cancelled"


def test_the_client_works_in_any_event_loop(
    perdure_client: Client, perdure_store: Store, perdure_task_queue: str, perdure_folder: Path
) -> None:
    stage = Stage(perdure_client, perdure_store, perdure_task_queue, perdure_folder)

    async def ask() -> TurnStatus | None:
        async with stage.worker(APP):
            return (await stage.ask("desk", "Look!")).status

    assert [asyncio.run(ask()), asyncio.run(ask())] == ["completed", "completed"]


@pytest.mark.parametrize(
    ("hold", "started"),
    [(Hold.BEFORE_EFFECT, 0), (Hold.IN_EFFECT, 1), (Hold.AFTER_EFFECT, 1)],
)
async def test_a_worker_killed_where_it_holds_is_recovered_from(
    perdure_stage: Stage, hold: Hold, started: int
) -> None:
    async with worker(perdure_stage, hold) as killed:
        turn = await perdure_stage.start("fault", "use send")
        await killed.held()
        assert effect_counts(perdure_stage.folder)["send"] == started
        killed.kill()
    async with worker(perdure_stage):
        await turn.wait()

    assert killed.pid > 0
    assert not killed.running
    assert turn.operation("send").status == "interrupted"
    assert effect_counts(perdure_stage.folder)["send"] == started


async def test_a_worker_that_goes_on_from_its_hold_ends_its_turn(perdure_stage: Stage) -> None:
    async with worker(perdure_stage, Hold.AFTER_EFFECT) as holding:
        turn = await perdure_stage.start("fault", "use send")
        await holding.held()
        holding.go_on()
        await turn.wait()
        assert turn.operation("send").status == "ok"
        assert await holding.stop() == 0


async def test_a_frozen_worker_comes_back_too_late(perdure_stage: Stage) -> None:
    async with worker(perdure_stage, Hold.AFTER_EFFECT) as frozen:
        turn = await perdure_stage.start("fault", "use send")
        await frozen.held()
        frozen.freeze()
        assert frozen.running
        async with worker(perdure_stage):
            await turn.wait()
        frozen.go_on()
        frozen.resume()
        await perdure_stage.until(lambda: turn.details.late_results, what="the late result")

    assert turn.operation("send").status == "interrupted"
    assert turn.details.late_results[0].text == "sent"


async def test_a_worker_without_its_app_says_why(perdure_stage: Stage) -> None:
    with pytest.raises(SetupError, match="'fault_app:nothing': the module has no") as caught:
        await perdure_stage.worker_process("fault_app:nothing").start()

    assert "The end of" in caught.value.__notes__[0]
    assert ".log" in caught.value.__notes__[0]


async def test_waiting_ends_where_every_worker_has_ended_by_itself(perdure_stage: Stage) -> None:
    async with worker(perdure_stage, Hold.IN_EFFECT) as lost:
        turn = await perdure_stage.start("fault", "use send")
        await lost.held()
        os.kill(lost.pid, signal.SIGKILL)

        with pytest.raises(SetupError, match="ended by itself"):
            await turn.wait()
        with pytest.raises(SetupError, match="ended by itself"):
            await perdure_stage.until(lambda: turn.status == "completed")
        assert await lost.ended() == -signal.SIGKILL


async def test_a_turn_nobody_waited_for_is_ended_with_its_test(
    perdure_client: Client, perdure_store: Store, perdure_task_queue: str, perdure_folder: Path
) -> None:
    stage = Stage(perdure_client, perdure_store, perdure_task_queue, perdure_folder)
    turn = await stage.start("desk", "Look!")
    process = worker(stage)
    await process.start()

    await stage.close()

    handle = perdure_client.get_workflow_handle(turn.handle.workflow_id)
    assert (await handle.describe()).status is WorkflowExecutionStatus.TERMINATED
    assert not process.running


def test_nothing_of_the_developers_own_settings_reaches_a_worker_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEMPORAL_API_KEY", "secret")
    monkeypatch.setenv("PERDURE_STORE_URL", "sqlite:///mine.db")
    monkeypatch.setenv("DESK_MODE", "inherited")

    process = WorkerProcess(
        "desk:app", address="a:1", task_queue="q", store_url="sqlite://", folder=tmp_path, OWN="1"
    )

    assert "TEMPORAL_API_KEY" not in process.environment
    assert process.environment["TEMPORAL_ADDRESS"] == "a:1"
    assert process.environment["PERDURE_STORE_URL"] == "sqlite://"
    assert (process.environment["DESK_MODE"], process.environment["OWN"]) == ("inherited", "1")


def test_a_model_is_replaced_and_the_app_stays_as_it_was() -> None:
    other = App([Agent("desk", "openai:some", "Look.", [look]), Agent("other", "openai:some")])

    both = with_model(other, ANSWERING)
    one = with_model(other, ANSWERING, agent="desk")

    assert {agent.model for agent in both.agents.values()} == {ANSWERING}
    assert (one.agent("desk").model, one.agent("other").model) == (ANSWERING, "openai:some")
    assert one.agent("desk").tools == (look,)
    assert other.agent("desk").model == "openai:some"
    with pytest.raises(UnknownAgent):
        with_model(other, ANSWERING, agent="nobody")
    with pytest.raises(AuthoringError):
        with_model(other, "")


async def test_waiting_takes_plain_and_async_conditions_and_ends() -> None:
    async def yes() -> bool:
        return True

    await until(lambda: 1)
    await until(yes)
    with pytest.raises(TimeoutError, match=r"rain did not hold within 0\.1 s"):
        await until(lambda: False, 0.1, what="rain")


USERS_TESTS = """
import pytest
from perdure import Agent, App
from perdure.testing import ScriptedModel

app = App([Agent("desk", ScriptedModel.replies("hello"))])
anyio_backend = pytest.fixture(lambda: "asyncio")

{mark}
async def test_it(perdure_stage):
    async with perdure_stage.worker(app):
        assert (await perdure_stage.ask("desk", "Hi")).answer == "hello"
    assert await perdure_stage.replays(app) == 1

{mark}
async def test_it_again(perdure_stage, perdure_worker):
    async with perdure_worker(app):
        assert (await perdure_stage.ask("desk", "Hi")).status == "completed"
"""


@pytest.mark.parametrize(
    ("mark", "options"),
    [
        ("@pytest.mark.asyncio", ["asyncio_mode=strict"]),
        ("@pytest.mark.asyncio(loop_scope='module')", ["asyncio_mode=strict"]),
        ("", ["asyncio_mode=auto", "asyncio_default_test_loop_scope=session"]),
        ("@pytest.mark.anyio", ["asyncio_mode=strict"]),
    ],
    ids=["strict", "module-loop", "auto-session-loop", "anyio"],
)
def test_the_fixtures_need_no_mode_and_no_loop_scope(
    tmp_path: Path, mark: str, options: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["perdure.testing"]\n')
    (tmp_path / "test_it.py").write_text(USERS_TESTS.format(mark=mark))
    # Every warning is an error; that the scope is unset is pytest-asyncio's own warning.
    settings = ["filterwarnings=error", "asyncio_default_fixture_loop_scope=function", *options]
    command = [sys.executable, "-m", "pytest", "-q", *(f"-o{setting}" for setting in settings)]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
