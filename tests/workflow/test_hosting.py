"""Turns among strangers: in a worker that has work of its own, and behind converters and codecs."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from harness.host_own import HostsOwn, greet
from harness.turns import Answers, call, calls, execute, request, rows, run_turn, start_raw, text
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DataConverter, PayloadCodec
from temporalio.worker import Worker

from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.contracts import limits
from perdure.contracts.turn import TurnResult
from perdure.settings import Settings
from perdure.stores import Store
from perdure.stores.queries import Reader
from perdure.worker import PerdurePlugin

pytestmark = pytest.mark.server

SETTINGS = Settings(heartbeat_timeout_s=5.0, grace_s=1.0)
SECRET = "a secret that must be encrypted"


@tool(replay=ReplaySafety.SAFE)
async def echo(word: str, ctx: ToolContext) -> str:
    """Say it again."""
    return f"{word} {ctx.generation}"


def desk(*steps: Any) -> tuple[App, Answers]:
    """An agent with one tool, and its model."""
    model = Answers(*(steps or (calls(call("echo", word=SECRET)), text(f"said {SECRET}"))))
    return App([Agent("desk", model, "Be brief.", [echo])]), model


async def test_a_worker_with_work_of_its_own_hosts_turns_beside_it(
    client: Client, task_queue: str, file_store: Store
) -> None:
    app, model = desk()
    plugin = PerdurePlugin(app, store=file_store, settings=SETTINGS)
    async with Worker(
        client,
        task_queue=task_queue,
        workflows=[HostsOwn],
        activities=[greet],
        plugins=[plugin],
    ):
        handle = await client.start_workflow(
            HostsOwn.run, request(request_id="child"), id=f"own-{task_queue}", task_queue=task_queue
        )
        greeting, answer = await asyncio.wait_for(handle.result(), 30)
        direct = await run_turn(client, task_queue, request_id="direct")

    assert (greeting, answer) == ("hello host", f"said {SECRET}")
    assert direct.status == "completed"
    # The child has another workflow id and is the same kind of turn, in the same conversation.
    assert [entry.version for entry in Reader(file_store).transcript("default", "c1")] == [
        *[1] * 4,
        *[2] * 4,
    ]
    assert len(model.requests) == 4


async def test_a_client_with_another_converter_starts_and_reads_turns(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    app, _ = desk()
    other = with_converter(client, pydantic_data_converter)
    async with running(app):
        started = await execute(other, task_queue, request())
        again = await run_turn(other, task_queue)
        plain = await execute(client, task_queue, request())
        failed = await start_raw(other, task_queue, request(""))
        with pytest.raises(Exception, match="failed"):
            await failed.result()

    assert started == plain
    assert TurnResult.model_validate(started).answer == again.answer == f"said {SECRET}"


async def test_a_worker_with_another_converter_runs_turns_for_any_client(
    client: Client, task_queue: str, file_store: Store
) -> None:
    app, _ = desk()
    other = with_converter(client, pydantic_data_converter)
    plugin = PerdurePlugin(app, store=file_store, settings=SETTINGS)
    async with Worker(other, task_queue=task_queue, plugins=[plugin]):
        result = await execute(client, task_queue, request())

    assert (result["status"], result["answer"]) == ("completed", f"said {SECRET}")


class Encrypting(PayloadCodec):
    """Stands for encryption: nothing of the text can be read in what it gives."""

    KEY = 0x5A

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Hide whole payloads."""
        return [
            Payload(
                metadata={"encoding": b"binary/encrypted"},
                data=bytes(byte ^ self.KEY for byte in payload.SerializeToString()),
            )
            for payload in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Bring them back; what was never hidden is refused."""
        shown: list[Payload] = []
        for payload in payloads:
            assert payload.metadata["encoding"] == b"binary/encrypted"
            shown.append(Payload.FromString(bytes(byte ^ self.KEY for byte in payload.data)))
        return shown


async def test_behind_an_encrypting_codec_temporal_can_read_nothing(
    client: Client, task_queue: str, file_store: Store
) -> None:
    app, model = desk()
    codec = dataclasses.replace(DataConverter.default, payload_codec=Encrypting())
    hidden = with_converter(client, codec)
    plugin = PerdurePlugin(app, store=file_store, settings=SETTINGS)
    async with Worker(hidden, task_queue=task_queue, plugins=[plugin]):
        handle = await start_raw(hidden, task_queue, request(SECRET))
        result = await asyncio.wait_for(handle.result(), 30)
        history = await handle.fetch_history()
        again = await execute(hidden, task_queue, request(SECRET))

    assert result["answer"] == f"said {SECRET}"
    assert again == result
    assert len(model.requests) == 2
    raw = b"".join(event.SerializeToString() for event in history.events)
    assert SECRET.encode() not in raw
    assert b"call_model" in raw


def with_converter(client: Client, converter: DataConverter) -> Client:
    """The same connection with another data converter."""
    config = client.config()
    config["data_converter"] = converter
    return Client(**config)


async def test_a_turn_that_continues_as_new_stays_one_turn(
    client: Client,
    task_queue: str,
    file_store: Store,
    running: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The sandbox reads the bound again for every workflow: three steps fill one run.
    monkeypatch.setattr(limits, "CONTINUE_AS_NEW_EVENTS", 40)
    steps = [calls(call("echo", word=str(step))) for step in range(9)]
    app, model = desk(*steps, text("done"))
    async with running(app):
        handle = await start_raw(client, task_queue, request(SECRET))
        result = await asyncio.wait_for(handle.result(), 40)
        stored = rows(file_store)
        again = await execute(client, task_queue, request(SECRET))
    runs = await chain(client, handle.id, handle.first_execution_run_id)

    assert (result["status"], result["answer"]) == ("completed", "done")
    assert again == result
    assert rows(file_store) == stored
    assert len(runs) >= 3
    assert all(len(history.events) < 60 for history in runs)
    # The message does not travel again with the state.
    holding = [SECRET.encode() in history.events[0].SerializeToString() for history in runs]
    assert holding == [True] + [False] * (len(runs) - 1)
    assert [one.step for one in model.requests] == list(range(1, 11))
    found = Reader(file_store).details(result["turn_id"])
    assert found is not None
    assert len(found.owners) == 1
    assert [one.text for one in found.operations] == [f"{step} 1" for step in range(9)]


async def chain(client: Client, workflow_id: str, run_id: str | None) -> list[WorkflowHistory]:
    """The histories of a workflow's runs, each continued as the next."""
    runs: list[WorkflowHistory] = []
    while run_id:
        runs.append(await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history())
        closing = runs[-1].events[-1].workflow_execution_continued_as_new_event_attributes
        run_id = closing.new_execution_run_id
    return runs
