"""Runs an author's function where it belongs: coroutines on the loop, plain functions in a thread.

A plain function cannot be stopped, so each has a daemon thread of its own: a thread that hangs
takes no place in a pool and does not keep the process alive. What the function raises is passed on
unchanged, but for what would be taken for an order to the caller's own event loop.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

from perdure.agents.context import ToolContext


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine, also through decorators that use `functools.wraps`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        inspect.unwrap(function)
    )


async def invoke(
    function: Callable[..., Any],
    keywords: dict[str, Any],
    context_parameter: str | None,
    context: ToolContext,
) -> Any:
    """Call the function and return what it returns.

    When the caller is cancelled, the context's `cancelled` is set; a coroutine is cancelled, a
    thread goes on and its result is dropped.
    """
    try:
        if is_coroutine_function(function):
            given = {} if context_parameter is None else {context_parameter: context}
            return await _call_coroutine(function, keywords | given)
        blocking = context.blocking(asyncio.get_running_loop())
        given = {} if context_parameter is None else {context_parameter: blocking}
        return await _call_in_thread(function, keywords | given)
    except asyncio.CancelledError:
        context.mark_cancelled()
        raise


async def _call_coroutine(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    try:
        return await function(**keywords)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody cancelled this call: something inside it was, which is a failure of the tool.
        raise RuntimeError("the tool raised CancelledError by itself") from error
    except SystemExit as error:
        # The event loop would take it as an order to stop the whole worker.
        raise RuntimeError("the tool raised SystemExit") from error


async def _call_in_thread(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    variables = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def body() -> None:
        result, error = None, None
        try:
            result = variables.run(function, **keywords)
        except BaseException as raised:
            # The edge of the thread: whatever it was belongs to the coroutine that waits.
            error = raised
        # A closed loop has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    name = getattr(function, "__name__", "function")
    threading.Thread(target=body, name=f"perdure-tool-{name}", daemon=True).start()
    result, error = await outcome
    if error is not None and not isinstance(error, Exception):
        # SystemExit and the like would stop the worker, CancelledError look like a cancelled call.
        raise RuntimeError(f"the tool raised {type(error).__name__}") from error
    if error is not None:
        raise error
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("the plain tool returned a coroutine; declare it with `async def`")
    return result
