"""A real small model through the provider adapter, with workers killed in the middle.

`make faults` installs what this needs (docs/real-model.md). Nothing here takes the model's part:
its answers are its own, so the tests look at what became of them, not at how clever they are.
"""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from harness.processes import WorkerProcess, until
from temporalio.client import Client

from perdure.cli.demo import run_demo
from perdure.cli.demo_real import REAL_SHOW, account
from perdure.cli.demo_real_model import ModelServer
from perdure.cli.demo_real_server import missing_packages
from perdure.cli.demo_scenes import SCENES
from perdure.cli.dev_server import DevServer
from perdure.client import start
from perdure.contracts.errors import PortTaken
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store
from perdure.stores.queries import Reader

MISSING = missing_packages()
pytestmark = [
    pytest.mark.faults,
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (docs/real-model.md)"
    ),
]

APP = "perdure.examples.real_model:app"
QUEUE = "real-model"
STORY_TOKENS = 200


@pytest_asyncio.fixture(loop_scope="session")
async def model(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with ModelServer(tmp_path) as served:
        yield served


@pytest.fixture
def reader(file_store: Store) -> Iterator[Reader]:
    return Reader(file_store)


def test_a_turn_with_tools_survives_a_killed_worker_and_every_call_is_accounted_for(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "perdure.cli.main", "demo", "--real-model"]

    demo = subprocess.run(
        [*command, "--folder", str(tmp_path / "demo")],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Every promise held" in demo.stdout
    assert demo.stdout.count("✓") == 15
    assert demo.stdout.count("asked twice") == 4
    assert processes_of(tmp_path) == []


async def test_a_worker_killed_in_the_middle_of_the_models_answer_buys_one_more_and_says_so(
    tmp_path: Path, model: ModelServer, server: DevServer, client: Client, reader: Reader
) -> None:
    story = {
        "agent": "small-desk",
        "conversation_id": "story",
        "request_id": "r1",
        "message": "Tell me a long story about a lighthouse.",
        # Without tools it streams, and long enough to be met in the middle.
        "tools": [],
        "parameters": {"max_tokens": STORY_TOKENS},
    }

    def worker() -> WorkerProcess:
        found = {"PERDURE_REAL_MODEL_URL": model.url, "NO_PROXY": "127.0.0.1"}
        return WorkerProcess(tmp_path, address=server.address, task_queue=QUEUE, app=APP, **found)

    async with worker() as first:
        handle = await start(client, story, task_queue=QUEUE)
        await until(lambda: any(partial.text for partial in reader.partials(handle.turn_id)))
        first.kill()
    half = reader.partials(handle.turn_id)[0].text
    async with worker():
        result = await handle.wait()

    details = reader.details(handle.turn_id)
    assert details is not None
    assert result.status is TurnStatus.COMPLETED
    assert [attempt.status for attempt in details.model_attempts] == ["lost", "committed"]
    (aborted,) = details.aborted_partials
    assert aborted.text == half
    # One thread, no cache, temperature 0: the second answer begins as the first one did.
    assert (result.answer or "").startswith(half)
    served = model.served()
    assert [call.outcome for call in served] == ["cut", "answered"]
    assert account(served, details.model_attempts).held


async def test_a_model_that_calls_no_tool_is_told_as_a_promise_that_did_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = replace(SCENES[0], message="Hello, who are you?")

    code = await run_demo(tmp_path / "demo", stay=False, show=replace(REAL_SHOW, scenes=(talk,)))

    told = capsys.readouterr().out
    assert code == 1, told
    assert "✗ NOT the killed worker had begun the effect" in told
    assert "✓ the turn completed" in told
    assert processes_of(tmp_path) == []


async def test_a_taken_port_is_told_and_whoever_has_it_is_not_believed(
    tmp_path: Path, model: ModelServer
) -> None:
    second = ModelServer(tmp_path / "second")
    second.port = model.port

    with pytest.raises(PortTaken):
        await second.start()

    assert second.pid is None


async def test_the_models_server_ends_when_it_is_asked_to(model: ModelServer) -> None:
    pid = model.pid
    assert pid is not None

    os.kill(pid, signal.SIGTERM)

    await until(lambda: model.pid is None)


def processes_of(folder: Path) -> list[str]:
    """Processes that have the folder in their command line."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            # It has ended in the meantime.
            continue
        if str(folder) in words and process.name != str(os.getpid()):
            found.append(process.name)
    return found
