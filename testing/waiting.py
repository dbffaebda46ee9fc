"""Waiting for what other processes leave behind. It must not know what is waited for."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Final

WAIT_S: Final = 45.0
POLL_S: Final = 0.02


async def until(
    condition: Callable[[], object], timeout_s: float = WAIT_S, *, what: str = "the condition"
) -> None:
    """Wait until the condition, a plain or an async function, gives something true.

    Raises TimeoutError after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        held = condition()
        if inspect.isawaitable(held):
            held = await held
        if held:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not hold within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
