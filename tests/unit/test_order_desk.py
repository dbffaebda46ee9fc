"""The order desk: what its services promise, and that each tool uses them as its safety demands."""

import asyncio
import json
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from perdure.activities.providers import resolve_model
from perdure.agents import NOT_EXECUTED, ToolContext, load_app
from perdure.contracts.errors import ToolError
from perdure.contracts.messages import (
    Message,
    Role,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    user_message,
)
from perdure.contracts.model import ModelRequest, ModelResponse
from perdure.contracts.safety import ReplaySafety
from perdure.examples import order_desk
from perdure.examples.order_desk_backend import Fenced, OrderDesk, OrderProblem


@pytest.fixture
def desk(tmp_path: Path) -> OrderDesk:
    desk = OrderDesk(tmp_path)
    desk.open()
    return desk


def test_the_desk_opens_with_nine_orders_and_keeps_what_was_done(desk: OrderDesk) -> None:
    desk.refund(2, "key")

    desk.open()

    assert [row["id"] for row in _rows(desk, "orders")] == list(range(1, 10))
    assert desk.order(2)["status"] == "refunded"


def test_an_order_nobody_made_is_a_problem(desk: OrderDesk) -> None:
    with pytest.raises(OrderProblem, match="no order 10"):
        desk.order(10)


def test_the_same_key_refunds_once(desk: OrderDesk) -> None:
    first = desk.refund(2, "key")
    second = desk.refund(2, "key")

    assert first == second == {"order": 2, "cents": 5900}
    assert len(_rows(desk, "refunds")) == 1


def test_another_key_does_not_refund_an_order_again(desk: OrderDesk) -> None:
    desk.refund(2, "key")

    with pytest.raises(OrderProblem, match="refunded before"):
        desk.refund(2, "other")

    assert len(_rows(desk, "refunds")) == 1


def test_a_booked_shipment_is_found_by_its_operation(desk: OrderDesk) -> None:
    booked = desk.ship(3, "toolop_1", 1)

    assert desk.find_or_fence_shipment("toolop_1", 1) == booked
    assert _rows(desk, "shipment_fences") == []


def test_a_generation_that_was_called_not_executed_can_never_ship(desk: OrderDesk) -> None:
    assert desk.find_or_fence_shipment("toolop_1", 1) is None

    with pytest.raises(Fenced):
        desk.ship(3, "toolop_1", 1)
    desk.ship(3, "toolop_1", 2)

    assert [row["generation"] for row in _rows(desk, "shipments")] == [2]


def test_an_order_is_shipped_once(desk: OrderDesk) -> None:
    desk.ship(3, "toolop_1", 1)

    with pytest.raises(OrderProblem, match="shipped before"):
        desk.ship(3, "toolop_2", 1)


def test_a_notice_is_one_line_of_the_outbox(desk: OrderDesk) -> None:
    to = desk.send(4, "email", "On its\nway")

    lines = desk.outbox.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"order": 4, "to": to, "channel": "email", "text": "On its\nway"}
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("order_status", {"order": 1}, {"item": "espresso machine", "status": "paid"}),
        ("refund_order", {"order": 2}, {"order": 2, "cents": 5900}),
        ("ship_order", {"order": 3}, {"order": 3}),
        ("notify_customer", {"order": 4, "notice": {"text": "Hello"}}, {"order": 4}),
    ],
)
async def test_each_tool_notes_its_start_and_does_its_work(
    desk: OrderDesk, name: str, arguments: dict[str, object], result: dict[str, object]
) -> None:
    outcome = await _tool(name).run(arguments, _context(desk, arguments, generation=2))

    assert result.items() <= outcome.model_dump().items()
    effects = _rows(desk, "effects")
    assert [(row["tool"], row["operation_id"], row["generation"]) for row in effects] == [
        (name, "toolop_1", 2)
    ]


@pytest.mark.parametrize("name", ["order_status", "refund_order", "ship_order", "notify_customer"])
async def test_each_tool_reports_an_unknown_order_to_the_model_for_good(
    desk: OrderDesk, name: str
) -> None:
    arguments: dict[str, object] = {"order": 77}
    if name == "notify_customer":
        arguments["notice"] = {"text": "Hello"}

    with pytest.raises(ToolError, match="no order 77") as caught:
        await _tool(name).run(arguments, _context(desk, arguments))

    assert not caught.value.retryable


async def test_a_rerun_refund_has_the_same_key_and_pays_once(desk: OrderDesk) -> None:
    for generation in (1, 2):
        await _tool("refund_order").run({"order": 2}, _context(desk, {"order": 2}, generation))

    assert len(_rows(desk, "effects")) == 2
    assert [row["idempotency_key"] for row in _rows(desk, "refunds")] == ["toolop_1"]


async def test_reconciling_a_lost_shipment_finds_it(desk: OrderDesk) -> None:
    shipped = await _tool("ship_order").run({"order": 3}, _context(desk, {"order": 3}))

    found = await _tool("ship_order").run_reconcile({"order": 3}, _context(desk, {"order": 3}))

    assert found == shipped


async def test_reconciling_a_shipment_that_never_was_stops_the_zombie(desk: OrderDesk) -> None:
    context = _context(desk, {"order": 3})

    assert await _tool("ship_order").run_reconcile({"order": 3}, context) is NOT_EXECUTED

    with pytest.raises(Fenced):
        await _tool("ship_order").run({"order": 3}, context)
    assert _rows(desk, "shipments") == []


@pytest.mark.parametrize(
    ("point", "name", "arguments"),
    [
        ("order_status", "order_status", {"order": 1}),
        ("refund_order", "refund_order", {"order": 2}),
        ("ship_order.before", "ship_order", {"order": 3}),
        ("ship_order", "ship_order", {"order": 3}),
        ("notify_customer", "notify_customer", {"order": 4, "notice": {"text": "Hello"}}),
    ],
)
async def test_a_demo_can_hold_a_first_execution_and_release_it(
    desk: OrderDesk,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    name: str,
    arguments: dict[str, object],
) -> None:
    monkeypatch.setenv("PERDURE_DEMO_HOLD", point)
    running = asyncio.ensure_future(_tool(name).run(arguments, _context(desk, arguments)))
    await asyncio.to_thread(_wait_for, desk.folder / f"holding.{point}")
    assert not running.done()

    (desk.folder / "release").touch()

    assert (await running).order == arguments["order"]


async def test_a_later_execution_is_never_held(
    desk: OrderDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_DEMO_HOLD", "order_status")

    await _tool("order_status").run({"order": 1}, _context(desk, {"order": 1}, generation=2))

    assert not (desk.folder / "holding.order_status").exists()


async def test_the_app_opens_the_desk_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_DEMO_DIR", str(tmp_path / "there"))
    app = load_app("perdure.examples.order_desk:app")

    async with order_desk.open_desk(app) as desk:
        assert desk.order(9)["item"] == "chess set"

    assert (tmp_path / "there" / "orders.db").exists()


def test_there_is_one_tool_of_each_safety() -> None:
    safeties = [tool.replay for tool in order_desk.order_desk.tools]

    assert sorted(safeties) == sorted(ReplaySafety)


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ("What is the status of order 1?", [("order_status", 1)]),
        ("what is the STATUS of orders 1 and 9", [("order_status", 1), ("order_status", 9)]),
        ("Refund order 2", [("refund_order", 2)]),
        ("Please ship order 3!", [("ship_order", 3)]),
        ("Notify the customer of order 4", [("notify_customer", 4)]),
        (
            "Refund order 2 and notify the customer of order 4",
            [("refund_order", 2), ("notify_customer", 4)],
        ),
        (
            "Notify the customer of order 3 and ship order 3",
            [("ship_order", 3), ("notify_customer", 3)],
        ),
        ("Ship order 5 and refund order 6", [("refund_order", 6), ("ship_order", 5)]),
        (
            "Status of order 1, refund order 2, ship order 3, notify the customer of order 4",
            [("order_status", 1), ("refund_order", 2), ("ship_order", 3), ("notify_customer", 4)],
        ),
        ("Hello", []),
        ("What is the meaning of life?", []),
    ],
)
async def test_the_scripted_model_understands_plain_requests(
    message: str, calls: list[tuple[str, int]]
) -> None:
    response = await _ask(user_message(message))

    asked = [part for part in response.parts if isinstance(part, ToolCallPart)]
    assert [(part.name, part.arguments["order"]) for part in asked] == calls
    for part in asked:
        _tool(part.name).validate_arguments(part.arguments)


async def test_the_scripted_model_reports_what_the_tools_said() -> None:
    question = user_message("Refund order 2")
    answer = await _ask(question)
    result = ToolResultPart(call_id="toolop_1", name="refund_order", text="it may have happened")

    report = await _ask(
        question,
        Message(role=Role.ASSISTANT, parts=answer.parts),
        Message(role=Role.TOOL, parts=(result,)),
        step=2,
    )

    assert report.parts == (TextPart(text="The desk reports: it may have happened"),)


class _Sink:
    async def text(self, delta: str) -> None:
        return None

    async def thinking(self, delta: str) -> None:
        return None


async def _ask(*messages: Message, step: int = 1) -> ModelResponse:
    name = order_desk.order_desk.model_name
    request = ModelRequest(agent="order-desk", model=name, messages=messages, step=step)
    return await resolve_model(name).respond(request, _Sink())


def _tool(name: str):
    tool = order_desk.order_desk.tool(name)
    assert tool is not None
    return tool


def _context(desk: OrderDesk, arguments: dict[str, object], generation: int = 1) -> ToolContext:
    async def output(_: str) -> None:
        return None

    return ToolContext(
        operation_id="toolop_1",
        generation=generation,
        arguments=arguments,
        deps=desk,
        namespace="default",
        conversation_id="conversation",
        turn_id="turn_1",
        output=output,
        cancelled=threading.Event(),
    )


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)


def _rows(desk: OrderDesk, table: str) -> list[sqlite3.Row]:
    database = sqlite3.connect(desk.database)
    database.row_factory = sqlite3.Row
    try:
        return database.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()
    finally:
        database.close()
