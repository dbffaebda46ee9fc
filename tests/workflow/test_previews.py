"""A worker process with its log at its loudest: no canary is in it, nor in exported histories.

With previews off Temporal holds no text but the caller's own input. With previews on it holds
short previews of arguments and the answer, and still nothing else.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.canary_app import ANSWER, ARGUMENT, CANARIES, MESSAGE, app
from harness.processes import WorkerProcess, until
from harness.turns import begin, details
from temporalio.client import Client

from perdure.cli.dev_server import DevServer
from perdure.client import TurnHandle
from perdure.contracts.events import UserMessageRecorded
from perdure.stores import Store, open_store
from perdure.stores.queries import Reader

pytestmark = pytest.mark.server


def worker(
    folder: Path, server: DevServer, task_queue: str, previews: str, level: str = "DEBUG"
) -> WorkerProcess:
    """A worker process of the leaking app."""
    return WorkerProcess(
        folder,
        address=server.address,
        task_queue=task_queue,
        app="canary_app:app",
        PERDURE_PREVIEWS=previews,
        PERDURE_LOG_LEVEL=level,
    )


async def exported(client: Client, handle: TurnHandle) -> str:
    """The history as it is exported, with every payload decoded."""
    history = await client.get_workflow_handle(handle.workflow_id).fetch_history()
    return "\n".join(texts_of(json.loads(history.to_json())))


def texts_of(value: Any) -> Iterator[str]:
    """Every text in exported JSON; data is base64 there."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield base64.b64decode(item).decode() if key == "data" else key
            yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    else:
        yield str(value)


def found_in(text: str) -> list[str]:
    """The canaries that escaped into it."""
    return [canary for canary in CANARIES if canary in text]


@pytest.mark.parametrize("previews", ["off", "on"])
async def test_a_completed_turn_leaks_nothing_into_history_or_log(
    server: DevServer, client: Client, task_queue: str, tmp_path: Path, previews: str
) -> None:
    async with worker(tmp_path, server, task_queue, previews) as process:
        handle = await begin(client, task_queue, MESSAGE)
        result = await asyncio.wait_for(handle.wait(), 60)
        await process.terminate()
        log = process.log
    history = await exported(client, handle)
    store = open_store(f"sqlite:///{tmp_path}/ledger.db")
    told = details(store, result)
    store.close()

    assert [one.status for one in told.operations] == [
        *["ok", "error", "error", "ok", "ok"],
        *["refused"] * 3,
    ]
    assert told.turn.answer == ANSWER
    allowed = [ARGUMENT, ANSWER] if previews == "on" else []
    assert found_in(history) == allowed
    # The caller's own input, and the first activity that carries it.
    assert history.count(MESSAGE) == 2
    # Also at our loudest: the libraries that would log what they send are kept quieter.
    assert found_in(log) == []
    assert MESSAGE not in log
    if previews == "off":
        assert result.answer is None
        assert result.turn_id in (result.answer_at or "")
        assert store.store_id in (result.answer_at or "")


async def test_a_turn_whose_model_fails_leaks_nothing(
    server: DevServer, client: Client, task_queue: str, tmp_path: Path
) -> None:
    async with worker(tmp_path, server, task_queue, "off") as process:
        handle = await begin(client, task_queue, f"{MESSAGE} die")
        result = await asyncio.wait_for(handle.wait(), 60)
        await process.terminate()
        log = process.log
    history = await exported(client, handle)

    assert result.stop_reason == "model_failed"
    assert found_in(history) == []
    assert history.count(MESSAGE) == 2
    assert found_in(log) == []
    assert MESSAGE not in log


async def test_a_cancelled_turn_leaks_nothing(
    server: DevServer, client: Client, task_queue: str, tmp_path: Path
) -> None:
    async with worker(tmp_path, server, task_queue, "off") as process:
        handle = await begin(client, task_queue, f"{MESSAGE} hang")
        await until(lambda: (tmp_path / "hanging").exists())
        await handle.cancel()
        result = await asyncio.wait_for(handle.wait(), 60)
        await process.terminate()
        log = process.log
    history = await exported(client, handle)

    assert result.status == "cancelled"
    assert found_in(history) == []
    assert history.count(MESSAGE) == 2
    assert found_in(log) == []
    assert MESSAGE not in log


async def test_the_message_of_a_turn_that_never_opened_is_read_from_its_input(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    # A worker that can end turns only: no model step ever opens this one.
    async with running(app, only=("end",)):
        handle = await begin(client, task_queue, MESSAGE, tools=["find"])
        result = await asyncio.wait_for(handle.wait(), 60)
    history = await exported(client, handle)

    assert (result.status, result.stop_reason) == ("failed", "model_lost")
    assert history.count(MESSAGE) == 2
    user, ended = (one.event for one in Reader(file_store).turn_events(handle.turn_id))
    assert isinstance(user, UserMessageRecorded)
    assert (user.message.text, user.tools) == (MESSAGE, ("find",))
    assert user.request_digest == handle.request_digest
    assert ended.kind == "turn_ended"
    assert Reader(file_store).transcript("default", "c1") == []
