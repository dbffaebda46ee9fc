"""An order desk: one agent with one tool of each replay safety, and effects one can count.

`perdure demo` kills its worker in the middle of each tool. What a tool of one's own needs from this
page is its `replay=`; `_pause` only gives the demo time to kill and has no place elsewhere.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, Field

from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.agents import NOT_EXECUTED, BlockingToolContext
from perdure.contracts.errors import ToolError
from perdure.examples.order_desk_backend import OrderDesk, OrderProblem

_PAUSE_S: Final = 120.0
_POLL_S: Final = 0.05


class OrderStatus(BaseModel):
    """What the desk knows of an order."""

    order: int
    item: str
    cents: int
    status: str


class Refund(BaseModel):
    """Money that was paid back."""

    order: int
    cents: int


class Shipment(BaseModel):
    """A parcel on its way."""

    order: int
    tracking: str


class Notice(BaseModel):
    """What a customer is told."""

    text: str = Field(min_length=1, max_length=500, description="The text of the notice.")
    channel: Literal["email", "sms"] = "email"


class Sent(BaseModel):
    """A notice that has left the house."""

    order: int
    to: str


@tool(replay=ReplaySafety.SAFE)
def order_status(order: int, ctx: BlockingToolContext) -> OrderStatus:
    """Look an order up.

    Args:
        order: The number of the order.
    """
    desk = _begin("order_status", ctx)
    _pause("order_status", ctx)
    try:
        return OrderStatus.model_validate({"order": order} | desk.order(order))
    except OrderProblem as problem:
        raise ToolError(str(problem), retryable=False) from None


@tool(replay=ReplaySafety.KEYED)
async def refund_order(order: int, ctx: ToolContext) -> Refund:
    """Pay an order back to its customer.

    Args:
        order: The number of the order.
    """
    desk = await asyncio.to_thread(_begin, "refund_order", ctx)
    await ctx.output(f"refunding order {order}")
    try:
        # The payment service knows the key: a second call with it changes nothing.
        refund = await asyncio.to_thread(desk.refund, order, ctx.operation_id)
    except OrderProblem as problem:
        raise ToolError(str(problem), retryable=False) from None
    await asyncio.to_thread(_pause, "refund_order", ctx)
    return Refund.model_validate(refund)


@tool(replay=ReplaySafety.RECONCILED)
def ship_order(order: int, ctx: BlockingToolContext) -> Shipment:
    """Send an order to its customer.

    Args:
        order: The number of the order.
    """
    desk = _begin("ship_order", ctx)
    ctx.output(f"booking a parcel for order {order}")
    _pause("ship_order.before", ctx)
    try:
        shipment = desk.ship(order, ctx.operation_id, ctx.generation)
    except OrderProblem as problem:
        raise ToolError(str(problem), retryable=False) from None
    _pause("ship_order", ctx)
    return Shipment.model_validate(shipment)


@ship_order.reconcile
async def find_shipment(ctx: ToolContext) -> object:
    """Say whether a lost `ship_order` booked its parcel; if not, see to it that it never will."""
    desk: OrderDesk = ctx.deps
    found = await asyncio.to_thread(desk.find_or_fence_shipment, ctx.operation_id, ctx.generation)
    return NOT_EXECUTED if found is None else Shipment.model_validate(found)


@tool
async def notify_customer(order: int, notice: Notice, ctx: ToolContext) -> Sent:
    """Send a notice to the customer of an order. A notice cannot be taken back.

    Args:
        order: The number of the order.
        notice: What to send, and how.
    """
    desk = await asyncio.to_thread(_begin, "notify_customer", ctx)
    await ctx.output(f"sending an {notice.channel} about order {order}")
    try:
        to = await asyncio.to_thread(desk.send, order, notice.channel, notice.text)
    except OrderProblem as problem:
        raise ToolError(str(problem), retryable=False) from None
    await asyncio.to_thread(_pause, "notify_customer", ctx)
    return Sent(order=order, to=to)


def demo_folder() -> Path:
    """Where the desk keeps its database and its outbox."""
    return Path(os.environ.get("PERDURE_DEMO_DIR", "perdure-data/order-desk"))


@asynccontextmanager
async def open_desk(app: App) -> AsyncGenerator[OrderDesk, None]:
    """The dependencies of the tools, for the life of a worker."""
    desk = OrderDesk(demo_folder())
    await asyncio.to_thread(desk.open)
    yield desk


order_desk = Agent(
    name="order-desk",
    model="scripted:perdure.examples/order_desk.yaml",
    instructions="You work at an order desk. Do what is asked with your tools and report briefly."
    " If it is unknown whether something happened, say so and do not do it again.",
    tools=[order_status, refund_order, ship_order, notify_customer],
)

app = App(agents=[order_desk], lifespan=open_desk)


def _begin(tool_name: str, ctx: ToolContext | BlockingToolContext) -> OrderDesk:
    desk: OrderDesk = ctx.deps
    desk.begin_effect(tool_name, ctx.operation_id, ctx.generation)
    return desk


def _pause(point: str, ctx: ToolContext | BlockingToolContext) -> None:
    """Hold the first execution where PERDURE_DEMO_HOLD says, until it is released or killed."""
    if os.environ.get("PERDURE_DEMO_HOLD") != point or ctx.generation != 1:
        return
    desk: OrderDesk = ctx.deps
    (desk.folder / f"holding.{point}").write_text(str(os.getpid()))
    deadline = time.monotonic() + _PAUSE_S
    while time.monotonic() < deadline and not ctx.cancelled:
        if (desk.folder / "release").exists():
            return
        time.sleep(_POLL_S)
