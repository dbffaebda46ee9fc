"""Records the histories that `test_replay.py` replays, from real runs on the real server.

    PYTHONPATH=tests:tests/harness python tests/replay/record.py [SHAPE ...]

Needed after an intended change of the workflow, once no turn of the old one is running any more.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from harness.processes import until
from harness.turn_stage import (
    STEADY,
    Gates,
    Handle,
    Stage,
    cause_of,
    pending,
    reset,
    result_of,
    start_fault_turn,
    temporal,
    until_async,
    worker_and_standby,
)
from replay.shapes import CONTINUE_AFTER_EVENTS, SHAPES, anonymous, mismatch, write
from temporalio.client import Client
from temporalio.worker import Worker

from perdure.cli.dev_server import DevServer
from perdure.contracts import limits
from perdure.stores import open_store
from perdure.worker import PerdurePlugin


class Recording:
    """One shape being played: a stage of its own, and a server that all share."""

    def __init__(self, name: str, folder: Path, client: Client) -> None:
        self.client = client
        self.folder = folder
        self.queue = name.replace("_", "-")
        self.store = open_store(f"sqlite:///{folder}/ledger.db")
        self.stage = Stage(folder, client, self.queue, self.store)

    @asynccontextmanager
    async def worker(self) -> AsyncGenerator[None]:
        """A worker in this process."""
        plugin = PerdurePlugin(self.stage.app, store=self.store, settings=STEADY)
        async with Worker(self.client, task_queue=self.queue, plugins=[plugin]):
            yield
            self.stage.release()

    async def held(self, tool: str) -> Handle:
        """A turn whose tool holds."""
        self.stage.holds = {tool}
        handle = await self.stage.start(f"use {tool}")
        await self.stage.holding(tool)
        return handle


Play = Callable[[Recording], Awaitable[Handle]]


def says(message: str) -> Play:
    """A turn that ends by itself."""

    async def play(on: Recording) -> Handle:
        async with on.worker():
            handle = await on.stage.start(message)
            await result_of(handle)
        return handle

    return play


def crashes(tool: str) -> Play:
    """The worker is killed in the tool's effect, and another one goes on."""

    async def play(on: Recording) -> Handle:
        async with worker_and_standby(
            on.folder,
            on.client.service_client.config.target_host,
            on.queue,
            PERDURE_FAULT_HOLD=tool,
        ) as (first, standby):
            handle = await start_fault_turn(on.client, on.queue, f"use {tool}")
            await until((on.folder / f"holding.{tool}").exists)
            first.kill()
            standby.go()
            await result_of(handle)
        return handle

    return play


def cancelled_in(tool: str) -> Play:
    """The turn is cancelled while that tool runs."""

    async def play(on: Recording) -> Handle:
        async with on.worker():
            handle = await on.held(tool)
            await handle.cancel()
            await cause_of(handle)
        return handle

    return play


async def failed(on: Recording) -> Handle:
    """The model refuses."""
    async with on.worker():
        handle = await on.stage.start("fail")
        await cause_of(handle)
    return handle


async def refused(on: Recording) -> Handle:
    """Another turn holds the conversation."""
    async with on.worker():
        await on.held("send")
        handle = await on.stage.start("hello", "r2")
        await cause_of(handle)
    return handle


async def cancelled_in_the_model(on: Recording) -> Handle:
    """The turn is cancelled while its model streams."""
    async with on.worker():
        handle = await on.stage.start("stream")
        await on.stage.streaming()
        await handle.cancel()
        await cause_of(handle)
    return handle


async def cancelled_in_a_tool_that_goes_on(on: Recording) -> Handle:
    """The tool's activity does not answer the cancellation: its call is not even dispatched."""
    gates = Gates("dispatch_call.before")
    async with on.worker():
        handle = await on.stage.start("use carve")
        await gates.reached("dispatch_call.before")
        await handle.cancel()
        await cause_of(handle)
        gates.remove()
    return handle


async def cancelled_before_it_opened(on: Recording) -> Handle:
    """The cancellation comes before any worker."""
    handle = await on.stage.start("hello")
    await handle.cancel()
    async with on.worker():
        await cause_of(handle)
    return handle


async def followed(on: Recording) -> Handle:
    """Another workflow runs the turn."""
    async with on.worker():
        await on.held("send")
        follower = await on.stage.start("use send")
        await until_async(lambda: pending(follower, "follow_turn"))
        on.stage.release()
        await result_of(follower)
    return follower


async def taken_over(on: Recording) -> Handle:
    """The workflow that ran the turn was terminated."""
    async with on.worker():
        owner = await on.held("send")
        follower = await on.stage.start("use send")
        await until_async(lambda: pending(follower, "follow_turn"))
        await temporal(on.client, "workflow", "terminate", "--workflow-id", owner.id)
        await until_async(lambda: pending(follower, "stage.send"))
        on.stage.release()
        await result_of(follower)
    return follower


async def was_reset(on: Recording) -> Handle:
    """A finished turn, reset to its last workflow task."""
    async with on.worker():
        handle = await on.stage.start("use send")
        await result_of(handle)
        await reset(on.client, handle, "LastWorkflowTask")
        await result_of(handle)
    return handle


async def continued(on: Recording) -> Handle:
    """The second run of a turn that continues as new after each tool."""
    first = await continued_as_new(on)
    history = await first.fetch_history()
    end = history.events[-1].workflow_execution_continued_as_new_event_attributes
    return on.client.get_workflow_handle(first.id, run_id=end.new_execution_run_id)


async def continued_as_new(on: Recording) -> Handle:
    """The first run of such a turn."""
    limits.CONTINUE_AS_NEW_EVENTS, usual = CONTINUE_AFTER_EVENTS, limits.CONTINUE_AS_NEW_EVENTS
    try:
        async with on.worker():
            handle = await on.stage.start("use look then send")
            described = await handle.describe()
            await result_of(handle)
    finally:
        limits.CONTINUE_AS_NEW_EVENTS = usual
    first = described.raw_description.workflow_execution_info.first_run_id
    return on.client.get_workflow_handle(handle.id, run_id=first)


PLAYS: dict[str, Play] = {
    "no_tool": says("hello"),
    "safe": says("use look"),
    "keyed": says("use pay"),
    "reconciled": says("use ship"),
    "unsafe": says("use send"),
    "parallel": says("use send and look"),
    "interrupted": crashes("send"),
    "reconciled_after_a_crash": crashes("ship"),
    "failed": failed,
    "refused": refused,
    "cancelled_in_a_tool": cancelled_in("send"),
    "cancelled_in_a_tool_that_goes_on": cancelled_in_a_tool_that_goes_on,
    "cancelled_in_the_model": cancelled_in_the_model,
    "cancelled_before_it_opened": cancelled_before_it_opened,
    "followed": followed,
    "taken_over": taken_over,
    "reset": was_reset,
    "continued_as_new": continued_as_new,
    "continued": continued,
}


async def record(names: list[str]) -> None:
    """Play the shapes and write their histories. Ends with an error at one of another shape."""
    async with DevServer(ui=False) as server:
        client = await Client.connect(server.address)
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                on = Recording(name, Path(folder), client)
                with contextlib.closing(on.store):
                    handle = await PLAYS[name](on)
                    played = json.loads((await handle.fetch_history()).to_json())
            history = anonymous(played)
            problem = mismatch(SHAPES[name], history)
            if problem:
                raise SystemExit(f"{name}: {problem}")
            write(name, history)
            print(f"{name}: {len(history['events'])} events")


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1:] or list(SHAPES)))
