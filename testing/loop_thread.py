"""An event loop in a thread of its own, so that fixtures can be plain functions.

A plain fixture works under every mode and loop scope of pytest-asyncio, and from within a running
loop. The thread lives as long as the fixture: on Linux, a server ends with the thread that started
it. It must not run tests: they have loops of their own.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """`with LoopThread() as loop: loop.run(coroutine)`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="perdure-testing", daemon=True
        )

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it in the thread and return what it returns, or raise what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
