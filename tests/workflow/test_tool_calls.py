"""Tools through a real worker: arguments, dependencies, order, retries and time-outs (DESIGN 5)."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from harness.processes import until
from harness.turns import (
    Answers,
    assert_next_turn_is_valid,
    begin,
    call,
    calls,
    details,
    operation,
    operations,
    run_turn,
    text,
)
from pydantic import BaseModel
from temporalio.client import Client

from perdure import NOT_EXECUTED, Agent, App, ReplaySafety, ToolContext, errors, tool
from perdure.agents import BlockingToolContext, Tool
from perdure.stores import Store

pytestmark = pytest.mark.server

Running = Callable[..., Any]


def desk(model: Answers, *tools: Tool, lifespan: Any = None) -> App:
    """One agent with these tools."""
    return App([Agent("desk", model, "Be brief.", tools)], lifespan=lifespan)


def one_call(name: str, **arguments: Any) -> Answers:
    """A model that asks for one call and then answers."""
    return Answers(calls(call(name, **arguments)), text("done"))


class Order(BaseModel):
    """An argument and a result."""

    number: int
    lines: list[str] = []


@asynccontextmanager
async def shelf(_app: App) -> AsyncGenerator[dict[str, int]]:
    """What tools depend on."""
    yield {"stock": 7}


@tool(replay=ReplaySafety.SAFE)
def stock(order: Order, ctx: BlockingToolContext) -> Order:
    """A plain tool with a model as argument and result, and a dependency."""
    ctx.output("counting")
    return Order(number=order.number, lines=[str(ctx.deps["stock"])])


async def test_plain_tools_take_and_give_models_and_see_the_dependencies(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    async with running(desk(one_call("stock", order={"number": 3}), stock, lifespan=shelf)):
        result = await run_turn(client, task_queue)

    assert operation(file_store, result).text == '{"number":3,"lines":["7"]}'


async def test_calls_of_a_step_run_at_once_and_their_results_keep_call_order(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    ended: list[int] = []
    turns = [asyncio.Event() for _ in range(5)]
    together = asyncio.Barrier(5)

    @tool(replay=ReplaySafety.SAFE)
    async def last_first(number: int) -> int:
        """Each waits until all run, then for the one behind it."""
        await together.wait()
        if number < 4:
            await turns[number + 1].wait()
        ended.append(number)
        turns[number].set()
        return number

    model = Answers(calls(*(call("last_first", number=n) for n in range(5))), text("done"))
    async with running(desk(model, last_first)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert ended == [4, 3, 2, 1, 0]
    assert [item.text for item in operations(file_store, result)] == ["0", "1", "2", "3", "4"]
    told = model.requests[1].messages[-1].results
    assert [part.text for part in told] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("safety", [ReplaySafety.SAFE, ReplaySafety.KEYED])
async def test_reported_errors_are_tried_four_times_with_one_key(
    client: Client, task_queue: str, file_store: Store, running: Running, safety: ReplaySafety
) -> None:
    keys: list[str] = []

    @tool(replay=safety)
    async def busy(ctx: ToolContext) -> str:
        """Never succeeds."""
        keys.append(ctx.operation_id)
        raise errors.ToolError("busy", retry_after_s=0.01)

    async with running(desk(one_call("busy"), busy)):
        result = await run_turn(client, task_queue)

    call_ = operation(file_store, result)
    assert (call_.status, call_.text) == ("error", "error: busy")
    assert len(keys) == 4
    assert len(set(keys)) == 1
    assert [x.outcome for x in call_.generations] == ["error", "error", "error", "won"]


FINAL = [
    (ReplaySafety.SAFE, errors.ToolError("no", retryable=False)),
    (ReplaySafety.SAFE, AssertionError("a bug")),
    (ReplaySafety.KEYED, UnicodeDecodeError("utf-8", b"", 0, 1, "bad")),
    (ReplaySafety.RECONCILED, errors.ToolError("no")),
    (ReplaySafety.UNSAFE, ValueError("who knows")),
]


@pytest.mark.parametrize(("safety", "error"), FINAL)
async def test_errors_that_no_try_can_mend_are_told_at_once(
    client: Client,
    task_queue: str,
    file_store: Store,
    running: Running,
    safety: ReplaySafety,
    error: Exception,
) -> None:
    tries = Counter[str]()

    async def asked(ctx: ToolContext) -> object:
        """A reconcile function that must not be needed."""
        tries["reconcile"] += 1
        return NOT_EXECUTED

    reconcile = asked if safety is ReplaySafety.RECONCILED else None

    @tool(replay=safety, reconcile=reconcile)
    async def fail() -> str:
        """Raise."""
        tries["fail"] += 1
        raise error

    async with running(desk(one_call("fail"), fail)):
        result = await run_turn(client, task_queue)

    call_ = operation(file_store, result)
    assert call_.status == "error"
    assert tries == {"fail": 1}
    # What was not the tool's own report leaves open whether an effect without a check happened.
    doubtful = safety in (ReplaySafety.UNSAFE, ReplaySafety.KEYED)
    assert ("may or may not" in (call_.text or "")) == doubtful


async def test_a_reconciled_tool_that_raises_is_asked_about_before_it_runs_again(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    story: list[str] = []

    @tool(replay=ReplaySafety.RECONCILED)
    async def book(ctx: ToolContext) -> str:
        """Breaks once."""
        story.append(f"book {ctx.generation}")
        if ctx.generation == 1:
            raise ConnectionError("gone")
        return "booked"

    @book.reconcile
    async def booked(ctx: ToolContext) -> object:
        """It did not happen."""
        story.append(f"asked {ctx.generation}")
        return NOT_EXECUTED

    async with running(desk(one_call("book"), book)):
        result = await run_turn(client, task_queue)

    assert story == ["book 1", "asked 1", "book 2"]
    assert operation(file_store, result).text == "booked"


async def test_a_safe_tool_over_its_time_is_cancelled_and_tried_again(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    generations: list[int] = []

    @tool(replay=ReplaySafety.SAFE, timeout_s=0.2)
    async def slow(ctx: ToolContext) -> str:
        """Hangs once, and then has something to say about being cancelled."""
        generations.append(ctx.generation)
        if ctx.generation == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "tidied up"
        return "in time"

    async with running(desk(one_call("slow"), slow)):
        result = await run_turn(client, task_queue)

    assert generations == [1, 2]
    assert operation(file_store, result).text == "in time"


async def test_an_unsafe_tool_over_its_time_is_interrupted_and_its_late_result_is_kept(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    go, started = threading.Event(), Counter[str]()

    @tool(timeout_s=0.2)
    def slow(ctx: BlockingToolContext) -> str:
        """A plain tool is never killed."""
        started["slow"] += 1
        ctx.output("half way")
        go.wait(30)
        return "after all"

    async with running(desk(one_call("slow"), slow)):
        result = await run_turn(client, task_queue)
        go.set()
        await until(lambda: details(file_store, result).late_results)

    call_ = operation(file_store, result)
    assert (call_.status, call_.reason) == ("interrupted", "timed_out")
    assert "half way" in (call_.text or "")
    assert started == {"slow": 1}
    assert [late.text for late in details(file_store, result).late_results] == ["after all"]


@pytest.mark.slow
async def test_a_tool_that_no_worker_has_any_more_ends_as_unavailable(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    """It waits 1, 5 and 25 seconds for a worker that has it."""

    @tool(replay=ReplaySafety.SAFE)
    async def gone() -> str:
        """Removed by a deploy in the middle of the turn."""
        return "never"

    # A worker that can do everything else, as after a deploy that has removed the tool.
    rest = ("call_model", "settle", "end", "follow_turn")
    async with running(desk(one_call("gone"), gone), only=rest):
        handle = await begin(client, task_queue)
        result = await asyncio.wait_for(handle.wait(), 90)

    call_ = operation(file_store, result)
    assert (call_.status, call_.reason) == ("not_executed", "tool_unavailable")
    assert call_.generations == ()
    assert result.status == "completed"
