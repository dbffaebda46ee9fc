"""`perdure.testing` records histories of real turns and replays them against installed code."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from harness.host_own import HostsOwn, Rewritten, greet
from temporalio.client import Client

from perdure import Agent, App, tool
from perdure.cli.dev_server import DevServer
from perdure.contracts.errors import SetupError
from perdure.testing import ScriptedModel, Stage, Turn, call, record_histories, replays

pytest_plugins = ["perdure.testing"]
pytestmark = [pytest.mark.server, pytest.mark.slow]


@tool
async def send(what: str) -> str:
    """Send something."""
    return f"{what} is sent"


MODEL = ScriptedModel.replies([call("send", what="it")], "Done: {results}")
APP = App([Agent("desk", MODEL, "Send.", [send])])


@pytest_asyncio.fixture(loop_scope="session")
async def turn(perdure_stage: Stage) -> AsyncGenerator[Turn]:
    """A turn that has ended, and that the server lists."""
    async with perdure_stage.worker(APP):
        turn = await perdure_stage.ask("desk", "Send it!", request_id="r1")
    yield turn


async def recorded(stage: Stage, folder: Path) -> Path:
    """The file of the stage's only turn, which the server lists a little later."""
    query = f"TaskQueue = '{stage.task_queue}'"
    written: list[Path] = []

    async def found() -> bool:
        written[:] = await record_histories(stage.client, folder, query=query)
        return bool(written)

    await stage.until(found)
    (path,) = written
    return path


def changed(path: Path, old: str, new: str) -> Path:
    """The file with another text in it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


async def test_the_turns_of_a_test_replay(perdure_stage: Stage, turn: Turn) -> None:
    assert await perdure_stage.replays(APP) == 1


async def test_recorded_turns_replay_from_their_files(
    perdure_stage: Stage, turn: Turn, tmp_path: Path
) -> None:
    folder = tmp_path / "histories"

    path = await recorded(perdure_stage, folder)

    assert path.parent == folder
    assert path.name.startswith("turn_default_conversation-")
    assert await replays(folder, app=APP) == 1
    assert await replays(str(path)) == 1


async def test_a_recording_names_no_machine(
    perdure_stage: Stage, turn: Turn, tmp_path: Path
) -> None:
    path = await recorded(perdure_stage, tmp_path)

    found: set[str] = set()

    def note(item: dict[str, Any]) -> dict[str, Any]:
        found.update(value for key, value in item.items() if key == "identity")
        return item

    json.loads(path.read_text(), object_hook=note)
    assert found == {"worker"}
    assert f"{os.getpid()}@" not in path.read_text()


async def test_every_turn_of_a_server_replays(
    perdure_client: Client, perdure_stage: Stage, turn: Turn, tmp_path: Path
) -> None:
    await recorded(perdure_stage, tmp_path)

    assert await replays(perdure_client) >= 1


async def test_a_turn_that_the_code_would_run_otherwise_is_named(
    perdure_stage: Stage, turn: Turn, tmp_path: Path
) -> None:
    path = changed(await recorded(perdure_stage, tmp_path), '"desk.send"', '"desk.sell"')

    with pytest.raises(AssertionError) as caught:
        await replays(path)

    said = str(caught.value)
    assert said.startswith("1 of 1 histories do not fit the installed code:\n")
    assert f"AgentTurn {turn.handle.workflow_id} ({path}): another decision than recorded" in said
    assert "desk.sell" in said


@pytest.mark.parametrize(
    ("app", "problem"),
    [
        (App([Agent("other", MODEL)]), "the app has no agent 'desk'"),
        (App([Agent("desk", MODEL)]), "the app has no tool desk.send"),
    ],
)
async def test_agents_and_tools_that_are_gone_are_named(
    perdure_stage: Stage, turn: Turn, app: App, problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        await perdure_stage.replays(app)


async def test_a_workflow_of_ones_own_replays_with_them(
    perdure_stage: Stage, perdure_client: Client
) -> None:
    turn = {"agent": "desk", "conversation_id": "c1", "request_id": "r1", "message": "Send it!"}
    async with perdure_stage.worker(APP, workflows=[HostsOwn], activities=[greet]):
        handle = await perdure_client.start_workflow(
            HostsOwn.run, turn, id="hosts-own", task_queue=perdure_stage.task_queue
        )
        await handle.result()
    history = await handle.fetch_history()

    assert await replays([history], workflows=[HostsOwn]) == 1
    with pytest.raises(AssertionError, match=r"its type 'HostsOwn' is unknown; pass workflows"):
        await replays([history])
    with pytest.raises(AssertionError, match="HostsOwn hosts-own: another decision"):
        await replays([history], workflows=[Rewritten])


async def test_a_check_without_histories_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no history to replay"):
        await replays(tmp_path)
    with pytest.raises(SetupError, match="no history to replay"):
        await replays([])
    with pytest.raises(SetupError, match="there is no file or folder"):
        await replays(tmp_path / "missing")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"events": [{}]', '{"events": 1}'])
async def test_a_file_that_is_no_history_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)

    with pytest.raises(SetupError, match=r"odd\.json is not a history"):
        await replays(tmp_path)


async def test_histories_are_recorded_by_a_command(
    perdure_server: DevServer, perdure_stage: Stage, turn: Turn, tmp_path: Path
) -> None:
    await recorded(perdure_stage, tmp_path / "first")
    command = [sys.executable, "-m", "perdure.testing.record", str(tmp_path / "second")]
    query = ["--query", f"TaskQueue = '{perdure_stage.task_queue}'"]
    environment = {**os.environ, "TEMPORAL_ADDRESS": perdure_server.address}

    done = subprocess.run(
        [*command, *query], env=environment, capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"1 histories in {tmp_path / 'second'}\n"
    assert await replays(tmp_path / "second", app=APP) == 1


def test_a_command_without_a_server_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure.testing.record", str(tmp_path)]
    environment = {**os.environ, "TEMPORAL_ADDRESS": "127.0.0.1:1"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr.startswith("perdure: no Temporal server answers at 127.0.0.1:1")
