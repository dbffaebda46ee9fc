"""How a command ends: SIGTERM and SIGINT as an event to wait for, so that it can stop its children
in order, and an exit that nothing can hold up.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, NoReturn

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


def leave(code: int) -> NoReturn:
    """End the process at once, with everything written.

    After a failed connection, Temporal's runtime may still call into an interpreter that is going
    down, which aborts it: the exit code would be SIGABRT's now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
