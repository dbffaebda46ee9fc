"""Whatever a tool returns or raises: it ran once, the model is told, the transcript stays valid."""

import asyncio
import datetime
import decimal
import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from harness.processes import until
from harness.turns import (
    Answers,
    assert_next_turn_is_valid,
    call,
    calls,
    details,
    operation,
    operations,
    run_turn,
    text,
)
from temporalio.client import Client

from perdure import NOT_EXECUTED, UNKNOWN, Agent, App, ReplaySafety, ToolContext, errors, tool
from perdure.agents import BlockingToolContext, Tool
from perdure.stores import Store
from perdure.stores.queries import Reader

pytestmark = pytest.mark.server

Running = Callable[..., Any]
LARGE = "line of text\n" * 250_000


class Closed(Mapping[str, int]):
    """Breaks when somebody looks into it, as the row of a closed session does."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("closed")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("closed")

    def __len__(self) -> int:
        return 1


class Mute(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


# Each value, what the model is told of it, and what was done to it.
VALUES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "datetime": (
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        '"2026-01-02T00:00:00Z"',
        ("not_json",),
    ),
    "Decimal": (decimal.Decimal("1.50"), '"1.50"', ("not_json",)),
    "UUID": (uuid.UUID(int=7), f'"{uuid.UUID(int=7)}"', ("not_json",)),
    "bytes": (b"\xff\x00", '"/wA="', ("not_json",)),
    "set": ({2, 1}, "[1,2]", ("not_json",)),
    "NaN": ({"rate": math.nan}, '{"rate":"NaN"}', ("not_json",)),
    "infinity": ([math.inf], '["Infinity"]', ("not_json",)),
    "NUL": ("a\x00b", "a␀b", ("sanitised",)),
    "surrogates": ({"\udc00": "a\ud800"}, '{"�":"a�"}', ("sanitised",)),
    "integers": ([2**53 + 1, -(2**70)], f"[{2**53 + 1},{-(2**70)}]", ()),
    "nothing": (None, "null", ()),
    "empty": ("", "", ()),
    "broken": ({"row": Closed()}, "", ("not_json",)),
}


def desk(model: Answers, *tools: Tool) -> App:
    """One agent with these tools."""
    return App([Agent("desk", model, "Be brief.", tools)])


@pytest.mark.parametrize("safety", [ReplaySafety.SAFE, ReplaySafety.UNSAFE])
async def test_what_is_no_json_is_kept_in_another_form_and_its_tool_ran_once(
    client: Client, task_queue: str, file_store: Store, running: Running, safety: ReplaySafety
) -> None:
    ran = Counter[str]()

    @tool(replay=safety)
    async def give(kind: str) -> Any:
        """Return a value of that kind."""
        ran[kind] += 1
        return VALUES[kind][0]

    model = Answers(calls(*(call("give", kind=kind) for kind in VALUES)), text("done"))
    async with running(desk(model, give)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert result.answer == "done"
    assert ran == dict.fromkeys(VALUES, 1)
    found = operations(file_store, result)
    assert {(one.status, len(one.generations)) for one in found} == {("ok", 1)}
    for one, (kind, (_, told, flags)) in zip(found, VALUES.items(), strict=True):
        assert one.flags == flags, kind
        assert one.text == told or kind == "broken", kind


async def test_three_megabytes_are_cut_for_the_model_and_kept_whole_in_the_ledger(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    ran = Counter[str]()

    @tool
    def dump() -> str:
        """Return more than Temporal would carry."""
        ran["dump"] += 1
        return LARGE

    model = Answers(calls(call("dump")), text("done"))
    async with running(desk(model, dump)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert (result.answer, ran) == ("done", {"dump": 1})
    one = operation(file_store, result)
    assert (one.status, one.flags) == ("ok", ("cut",))
    assert one.full_digest is not None
    assert Reader(file_store).blob(one.full_digest) == LARGE
    told = model.requests[1].messages[-1].results[0]
    assert len(told.text.encode()) < 51 * 1024
    assert told.text.count("\n") <= 2000


RAISES = [ValueError("no such order"), KeyError("x\ud800\x00"), Mute(), SystemExit(3)]


async def test_a_tool_that_raises_is_a_result_for_the_model(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    ran = Counter[str]()

    @tool
    async def fail(number: int) -> str:
        """Raise one of them, on the loop."""
        ran["fail"] += 1
        raise RAISES[number]

    @tool
    def fail_in_thread(number: int) -> str:
        """Raise one of them, in a thread."""
        ran["fail_in_thread"] += 1
        raise RAISES[number]

    asked = [
        call(name, number=number)
        for name in ("fail", "fail_in_thread")
        for number in range(len(RAISES))
    ]
    model = Answers(calls(*asked), text("sorry"))
    async with running(desk(model, fail, fail_in_thread)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert result.answer == "sorry"
    assert ran == {"fail": len(RAISES), "fail_in_thread": len(RAISES)}
    found = operations(file_store, result)
    assert {(one.status, one.reason) for one in found} == {("error", "tool_error")}
    assert (found[0].text or "").startswith("error: ValueError: no such order")
    assert all("may or may not have taken effect" in (one.text or "") for one in found)


async def test_plain_tools_of_one_step_run_at_once(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    together = threading.Barrier(8)

    @tool(replay=ReplaySafety.SAFE)
    def meet(number: int, ctx: BlockingToolContext) -> int:
        """None gets on before all are there."""
        ctx.output(f"{number} is here")
        together.wait(timeout=30)
        return number

    model = Answers(calls(*(call("meet", number=n) for n in range(8))), text("done"))
    async with running(desk(model, meet)):
        result = await run_turn(client, task_queue)

    assert [one.text for one in operations(file_store, result)] == [str(n) for n in range(8)]


async def test_a_narrowed_turn_is_offered_its_tools_only_and_refuses_the_others(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    ran = Counter[str]()

    @tool
    async def read() -> str:
        """Allowed."""
        ran["read"] += 1
        return "read"

    @tool
    async def write() -> str:
        """Not in this turn."""
        ran["write"] += 1
        return "written"

    model = Answers(calls(call("write"), call("read"), call("erase")), text("done"))
    async with running(desk(model, read, write)):
        result = await run_turn(client, task_queue, tools=["read"])
        await assert_next_turn_is_valid(client, task_queue, model)

    assert ran == {"read": 1}
    assert [spec.name for spec in model.requests[0].tools] == ["read"]
    # The next turn of the conversation is not narrowed.
    assert [spec.name for spec in model.requests[-1].tools] == ["read", "write"]
    found = operations(file_store, result)
    assert [(one.status, one.reason) for one in found] == [
        ("refused", "capability_denied"),
        ("ok", None),
        ("refused", "unknown_tool"),
    ]


async def test_a_retry_after_nothing_comes_at_once(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    @tool(replay=ReplaySafety.KEYED)
    async def busy() -> str:
        """Its callee does not want to be waited for."""
        raise errors.ToolError("busy", retry_after_s=0)

    model = Answers(calls(call("busy")), text("done"))
    async with running(desk(model, busy)):
        result = await run_turn(client, task_queue)

    moments = [one.started_at for one in operation(file_store, result).generations]
    assert len(moments) == 4
    # The usual waits would be two, four and eight seconds.
    assert (moments[-1] - moments[0]).total_seconds() < 4


async def test_a_reconciled_tool_over_its_time_is_asked_about(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    story: list[str] = []

    @tool(replay=ReplaySafety.RECONCILED, timeout_s=0.2)
    async def ship(parcel: int, ctx: ToolContext) -> str:
        """Never comes back by itself."""
        story.append(f"ship {ctx.generation}")
        await asyncio.Event().wait()
        return "never"

    @ship.reconcile
    async def shipped(parcel: int, ctx: ToolContext) -> object:
        """The second execution turns out to have worked."""
        story.append(f"asked {parcel} {ctx.generation}")
        return NOT_EXECUTED if ctx.generation == 1 else {"shipped": parcel}

    model = Answers(calls(call("ship", parcel=5)), text("done"))
    async with running(desk(model, ship)):
        result = await run_turn(client, task_queue)

    assert story == ["ship 1", "asked 5 1", "ship 2", "asked 5 2"]
    one = operation(file_store, result)
    assert (one.status, one.text) == ("ok", '{"shipped":5}')


async def test_nobody_can_tell_is_an_interrupted_result(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    @tool(replay=ReplaySafety.RECONCILED)
    async def ship(ctx: ToolContext) -> str:
        """Breaks after it has said something."""
        await ctx.output("label printed")
        raise ConnectionError("gone")

    @ship.reconcile
    def shipped() -> object:
        """A plain function, and the callee does not know either."""
        return UNKNOWN

    model = Answers(calls(call("ship")), text("done"))
    async with running(desk(model, ship)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    one = operation(file_store, result)
    assert (one.status, one.reason) == ("interrupted", "unknown_outcome")
    assert "label printed" in (one.text or "")
    assert len(one.generations) == 1


async def test_an_unsafe_coroutine_over_its_time_is_cancelled_and_not_run_again(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    story: list[str] = []

    @tool(timeout_s=0.2)
    async def send(ctx: ToolContext) -> str:
        """Hangs half way."""
        story.append("send")
        await ctx.output("half sent")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            story.append(f"cancelled {ctx.cancelled}")
            raise
        return "never"

    model = Answers(calls(call("send")), text("done"))
    async with running(desk(model, send)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert story == ["send", "cancelled True"]
    one = operation(file_store, result)
    assert (one.status, one.reason) == ("interrupted", "timed_out")
    assert "half sent" in (one.text or "")
    assert "may or may not" in (one.text or "")


async def test_the_first_outcome_wins_also_when_its_execution_was_given_up(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    keys: list[str] = []
    second_runs = threading.Event()

    @tool(replay=ReplaySafety.KEYED, timeout_s=1.0)
    def pay(ctx: BlockingToolContext) -> str:
        """The first execution hangs past its time and comes back while the second one runs."""
        keys.append(ctx.operation_id)
        if ctx.generation == 1:
            second_runs.wait(30)
            return "paid at first"
        second_runs.set()
        settled = Reader(file_store)
        while not any(
            event.event.kind == "tool_settled" for event in settled.turn_events(ctx.turn_id)
        ):
            threading.Event().wait(0.02)
        return "paid again"

    model = Answers(calls(call("pay")), text("done"))
    async with running(desk(model, pay)):
        result = await run_turn(client, task_queue)
        await until(lambda: details(file_store, result).late_results)
        await assert_next_turn_is_valid(client, task_queue, model)

    # The callee was given one key, so the two executions are one payment.
    assert len(keys) == 2
    assert len(set(keys)) == 1
    one = operation(file_store, result)
    assert (one.text, [x.outcome for x in one.generations]) == ("paid at first", ["won", "late"])
    assert [late.text for late in details(file_store, result).late_results] == ["paid again"]


@pytest.mark.slow
async def test_a_keyed_tool_that_never_ends_in_time_is_given_up_after_four_tries(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    """It waits two, four and eight seconds between its tries."""
    started = Counter[int]()

    @tool(replay=ReplaySafety.KEYED, timeout_s=0.1)
    async def hang(ctx: ToolContext) -> str:
        """Never ends."""
        started[ctx.generation] += 1
        await asyncio.Event().wait()
        return "never"

    model = Answers(calls(call("hang")), text("done"))
    async with running(desk(model, hang)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert started == {1: 1, 2: 1, 3: 1, 4: 1}
    one = operation(file_store, result)
    assert one.status == "error"
    assert one.text == (
        "error: the tool did not end within its time. The call may or may not have taken effect."
    )
