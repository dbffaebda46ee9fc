"""SIGTERM and SIGINT as an event to wait for, so that a command can stop its children in order."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals() -> Generator[asyncio.Event, None, None]:
    """Within it the first signal sets the event; a second one acts as it does without it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def remove() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        remove()
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        remove()
