"""Contexts, threads and cancellation: how plain and coroutine tools run."""

import asyncio
import contextvars
import os
import sys
import threading
from typing import Any

import pytest

from perdure.agents import BlockingToolContext, ToolContext, tool
from perdure.contracts.errors import SinkClosed

WAIT_S = 10
caller_name: contextvars.ContextVar[str] = contextvars.ContextVar("caller_name", default="nobody")


class Recorder:
    """Takes output; `durable` is set by the test when the text may count as stored."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.arrived = asyncio.Event()
        self.durable = asyncio.Event()

    async def take(self, text: str) -> None:
        self.texts.append(text)
        self.arrived.set()
        await self.durable.wait()


def context(**facts: Any) -> ToolContext:
    return ToolContext(operation_id="toolop_1", **facts)


def test_a_context_carries_the_facts_of_its_call():
    flag = threading.Event()
    made = ToolContext(
        operation_id="op",
        generation=2,
        arguments={"a": 1},
        deps="pool",
        namespace="tenant",
        conversation_id="c",
        turn_id="t",
        cancelled=flag,
    )

    assert (made.operation_id, made.generation, made.arguments) == ("op", 2, {"a": 1})
    assert (made.deps, made.namespace) == ("pool", "tenant")
    assert (made.conversation_id, made.turn_id) == ("c", "t")
    assert not made.cancelled
    flag.set()
    assert made.cancelled


async def test_output_without_a_recorder_goes_nowhere():
    await context().output("text")
    BlockingToolContext(operation_id="op").output("text")


async def test_a_repr_of_a_context_shows_no_value():
    assert "canary" not in repr(context(arguments={"a": "canary"}, deps="canary"))


async def test_a_coroutine_waits_until_its_output_is_durable():
    recorder = Recorder()

    @tool
    async def work(ctx: ToolContext) -> str:
        await ctx.output("half")
        return "done"

    running = asyncio.create_task(work.run({}, context(output=recorder.take)))
    await recorder.arrived.wait()
    assert not running.done()
    recorder.durable.set()

    assert await running == "done"
    assert recorder.texts == ["half"]


async def test_a_plain_tool_blocks_until_its_output_is_durable():
    recorder = Recorder()
    went_on = threading.Event()

    @tool
    def work(ctx: BlockingToolContext) -> str:
        ctx.output("half")
        went_on.set()
        return "done"

    running = asyncio.create_task(work.run({}, context(output=recorder.take)))
    await recorder.arrived.wait()
    assert not went_on.is_set()
    recorder.durable.set()

    assert await running == "done"
    assert recorder.texts == ["half"]


async def test_a_refusal_of_output_reaches_the_plain_tool():
    async def refuse(text: str) -> None:
        raise SinkClosed("the call has ended")

    @tool
    def work(ctx: BlockingToolContext) -> str:
        with pytest.raises(SinkClosed, match="the call has ended"):
            ctx.output("late")
        return "noticed"

    assert await work.run({}, context(output=refuse)) == "noticed"


async def test_cancelled_recording_reaches_the_plain_tool_as_a_closed_sink():
    async def be_cancelled(text: str) -> None:
        raise asyncio.CancelledError

    @tool
    def work(ctx: BlockingToolContext) -> str:
        with pytest.raises(SinkClosed, match="cancelled"):
            ctx.output("late")
        return "noticed"

    assert await work.run({}, context(output=be_cancelled)) == "noticed"


async def test_a_plain_tool_gets_a_blocking_context_with_the_same_facts():
    @tool
    def work(ctx: BlockingToolContext) -> Any:
        return ctx

    given = context(deps="pool", arguments={"a": 1}, generation=3)

    got = await work.run({}, given)

    assert isinstance(got, BlockingToolContext)
    assert (got.operation_id, got.deps, got.arguments) == ("toolop_1", "pool", {"a": 1})
    assert got.generation == 3


async def test_each_plain_tool_has_a_daemon_thread_of_its_own():
    both_run = threading.Barrier(2)

    @tool
    def work() -> threading.Thread:
        both_run.wait(WAIT_S)
        return threading.current_thread()

    one, other = await asyncio.gather(work.run({}, context()), work.run({}, context()))

    assert one is not other
    assert one.daemon
    assert "work" in one.name
    assert one is not threading.current_thread()


async def test_context_variables_are_seen_in_the_thread():
    @tool
    def work() -> str:
        return caller_name.get()

    token = caller_name.set("the turn")
    try:
        assert await work.run({}, context()) == "the turn"
    finally:
        caller_name.reset(token)


async def test_a_cancelled_plain_tool_goes_on_with_its_flag_set():
    started, released, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    @tool
    def work(ctx: BlockingToolContext) -> None:
        started.set()
        released.wait(WAIT_S)
        seen.append(ctx.cancelled)
        ended.set()

    flag = threading.Event()
    running = asyncio.create_task(work.run({}, context(cancelled=flag)))
    await asyncio.to_thread(started.wait, WAIT_S)
    assert not flag.is_set()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    released.set()
    await asyncio.to_thread(ended.wait, WAIT_S)

    assert flag.is_set()
    assert seen == [True]


async def test_a_cancelled_coroutine_tool_is_cancelled_and_flagged():
    started = asyncio.Event()
    cleaned: list[bool] = []

    @tool
    async def work(ctx: ToolContext) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    given = context()
    running = asyncio.create_task(work.run({}, given))
    await started.wait()
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned == [True]
    assert given.cancelled


async def test_a_tool_that_raises_cancelled_error_by_itself_has_failed():
    @tool
    async def work() -> None:
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner

    given = context()

    with pytest.raises(RuntimeError, match="by itself"):
        await work.run({}, given)
    assert not given.cancelled


@pytest.mark.parametrize("kind", ["coroutine", "plain"])
async def test_a_tool_that_exits_does_not_stop_the_worker(kind: str):
    async def coroutine() -> None:
        sys.exit(3)

    def plain() -> None:
        sys.exit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await tool(coroutine if kind == "coroutine" else plain).run({}, context())


async def test_a_plain_tool_that_raises_stop_iteration_has_failed():
    @tool
    def work() -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await work.run({}, context())


async def test_a_plain_tool_that_returns_a_coroutine_has_failed():
    async def inner() -> None: ...

    @tool
    def work() -> Any:
        return inner()

    with pytest.raises(TypeError, match="async def"):
        await work.run({}, context())


def test_a_plain_tool_outlives_its_event_loop():
    started, released = threading.Event(), threading.Event()
    seen: list[str] = []
    sent: list[str] = []

    async def take(text: str) -> None:
        sent.append(text)

    @tool
    def work(ctx: BlockingToolContext) -> None:
        started.set()
        released.wait(WAIT_S)
        try:
            ctx.output("late")
        except SinkClosed as error:
            seen.append(str(error))

    async def start_and_leave() -> None:
        running = asyncio.ensure_future(work.run({}, context(output=take)))
        await asyncio.to_thread(started.wait, WAIT_S)
        running.cancel()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start_and_leave())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    thread = next(item for item in threading.enumerate() if item.name == "perdure-tool-work")
    released.set()
    thread.join(WAIT_S)

    assert sent == []
    assert seen == ["the worker has stopped; this output is not recorded"]


@pytest.mark.slow
def test_a_process_ends_while_a_plain_tool_hangs(tmp_path: Any):
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, threading\n"
        "from perdure.agents import ToolContext, tool\n"
        "started = threading.Event()\n"
        "@tool\n"
        "def hang() -> None:\n"
        "    started.set()\n"
        "    threading.Event().wait()\n"
        "async def main() -> None:\n"
        "    task = asyncio.create_task(hang.run({}, ToolContext(operation_id='op')))\n"
        "    await asyncio.to_thread(started.wait)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )

    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, str(program)]) == 0
