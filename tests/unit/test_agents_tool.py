"""What `@tool` makes of a function, and how reconcile functions are declared."""

import functools
from typing import Any

import pytest

from perdure.agents import (
    NOT_EXECUTED,
    UNKNOWN,
    BlockingToolContext,
    InvalidArguments,
    ReplaySafety,
    Tool,
    ToolContext,
    tool,
)
from perdure.contracts.errors import AuthoringError, ToolError


def context(**facts: Any) -> ToolContext:
    return ToolContext(operation_id="toolop_1", **facts)


def test_a_bare_tool_is_unsafe_and_named_like_its_function():
    @tool
    async def charge(order: int) -> str:
        """Charge an order."""
        return str(order)

    assert isinstance(charge, Tool)
    assert charge.name == "charge"
    assert charge.description == "Charge an order."
    assert charge.replay is ReplaySafety.UNSAFE
    assert charge.timeout_s is None
    assert charge.is_async
    assert charge.reconcile_function is None
    assert charge.spec.name == "charge"


def test_a_tool_takes_its_options():
    @tool(replay=ReplaySafety.SAFE, timeout_s=3, name="look-up", description="Look.")
    def look(query: str) -> str:
        """Not this one."""
        return query

    assert (look.name, look.description) == ("look-up", "Look.")
    assert (look.replay, look.timeout_s) == (ReplaySafety.SAFE, 3)
    assert not look.is_async
    assert look.spec.description == "Look."


async def test_a_tool_stays_callable_like_the_plain_function():
    @tool
    def double(number: int) -> int:
        return number * 2

    @tool
    async def half(number: int) -> float:
        return number / 2

    assert double(4) == 8
    assert await half(number=4) == 2.0


async def test_a_coroutine_tool_gets_arguments_and_its_context():
    @tool
    async def charge(order: int, ctx: ToolContext) -> Any:
        return order, ctx

    given = context()

    assert await charge.run({"order": "7"}, given) == (7, given)


async def test_the_raw_value_is_returned_unchanged():
    value = object()

    @tool
    def look() -> Any:
        return value

    assert await look.run({}, context()) is value


async def test_invalid_arguments_do_not_reach_the_function():
    called: list[int] = []

    @tool
    async def charge(order: int) -> None:
        called.append(order)

    with pytest.raises(InvalidArguments):
        await charge.run({"order": 1, "surplus": 2}, context())

    assert called == []


@pytest.mark.parametrize("kind", ["coroutine", "plain"])
async def test_what_a_tool_raises_is_passed_on_unchanged(kind: str):
    error = ToolError("no such order", retryable=False)

    async def coroutine() -> None:
        raise error

    def plain() -> None:
        raise error

    with pytest.raises(ToolError) as caught:
        await tool(coroutine if kind == "coroutine" else plain).run({}, context())

    assert caught.value is error


async def test_a_wrapped_coroutine_function_counts_as_one():
    async def charge(order: int, ctx: ToolContext) -> Any:
        await ctx.output("charging")
        return order

    @functools.wraps(charge)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return charge(*args, **kwargs)

    made = tool(wrapped)

    assert made.is_async
    assert await made.run({"order": 2}, context()) == 2


async def test_a_bound_method_can_be_a_tool():
    class Desk:
        prefix = "order"

        def look(self, number: int) -> str:
            """Look."""
            return f"{self.prefix} {number}"

    assert await tool(Desk().look).run({"number": 1}, context()) == "order 1"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x" * 65, "<lambda>"])
def test_a_name_outside_the_alphabet_is_refused(name: str):
    with pytest.raises(AuthoringError, match="its name must be 1 to 64"):
        tool(name=name)(lambda: None)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float):
    with pytest.raises(AuthoringError, match="timeout_s"):
        tool(timeout_s=timeout_s)(lambda: None)


def test_only_a_function_can_be_a_tool():
    @tool
    def look() -> None: ...

    with pytest.raises(AuthoringError, match="not of a FunctionTool"):
        tool(look)
    with pytest.raises(AuthoringError, match="not of a partial"):
        tool(functools.partial(print, "x"))


def test_a_generator_cannot_be_a_tool():
    async def stream() -> Any:
        yield 1

    with pytest.raises(AuthoringError, match="generator"):
        tool(stream)


def test_a_coroutine_tool_cannot_ask_for_a_blocking_context():
    async def look(ctx: BlockingToolContext) -> None: ...

    with pytest.raises(AuthoringError, match="a coroutine gets a ToolContext"):
        tool(look)


def test_a_repr_shows_no_code_and_no_arguments():
    @tool(replay=ReplaySafety.KEYED)
    def look() -> None: ...

    assert repr(look) == "Tool('look', replay='keyed')"


async def test_a_reconcile_function_gets_the_context_and_what_it_asks_for():
    async def ask(ctx: ToolContext, cents: int) -> Any:
        return ctx.operation_id, ctx.arguments, cents

    @tool(replay=ReplaySafety.RECONCILED, reconcile=ask)
    async def charge(order: str, cents: int) -> str:
        return order

    arguments = {"order": "a", "cents": 5}

    answer = await charge.run_reconcile(arguments, context(arguments=arguments))

    assert answer == ("toolop_1", arguments, 5)


async def test_a_reconcile_function_may_be_declared_afterwards_and_be_plain():
    @tool(replay=ReplaySafety.RECONCILED)
    def charge(order: str) -> str:
        return order

    @charge.reconcile
    def charge_reconcile(ctx: BlockingToolContext) -> Any:
        return UNKNOWN if ctx.generation == 2 else NOT_EXECUTED

    assert charge.reconcile_function is charge_reconcile
    assert await charge.run_reconcile({"order": "a"}, context()) is NOT_EXECUTED
    assert await charge.run_reconcile({"order": "a"}, context(generation=2)) is UNKNOWN


def test_only_a_reconciled_tool_has_a_reconcile_function():
    with pytest.raises(AuthoringError, match="only a RECONCILED tool"):
        tool(replay=ReplaySafety.KEYED, name="charge", reconcile=lambda: None)(lambda: None)


def test_a_second_reconcile_function_is_refused():
    charge = tool(replay=ReplaySafety.RECONCILED, name="c", reconcile=lambda: None)(lambda: None)

    with pytest.raises(AuthoringError, match="already"):
        charge.reconcile(lambda: None)


def test_a_reconcile_function_cannot_ask_for_what_the_tool_does_not_have():
    def ask(amount: int) -> None: ...

    with pytest.raises(AuthoringError, match="the tool has no parameter amount"):
        tool(replay=ReplaySafety.RECONCILED, name="c", reconcile=ask)(lambda: None)


async def test_a_tool_without_a_reconcile_function_cannot_be_asked():
    with pytest.raises(AuthoringError, match="no reconcile function"):
        await tool(name="c")(lambda: None).run_reconcile({}, context())
