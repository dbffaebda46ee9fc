"""A turn that a test has started: waiting for it, and what the ledger has of it.

All that is read here is read from the ledger, which is right also where Temporal is not.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from perdure.client import TurnHandle
from perdure.contracts.events import LedgerEvent
from perdure.contracts.messages import Message
from perdure.contracts.turn import TurnResult, TurnStatus
from perdure.contracts.views import OperationView, TurnDetails
from perdure.stores.queries import Reader

TURN_S: Final = 60.0
_POLL_S: Final = 0.2


class Turn:
    """One turn; `handle` is what `perdure.client` gives. Its ledger may be read at any time.

    `result` is there once it was waited for.
    """

    def __init__(self, handle: TurnHandle, reader: Reader, check: Callable[[], None]) -> None:
        self.handle = handle
        self.result: TurnResult | None = None
        self._reader = reader
        self._check = check

    @property
    def turn_id(self) -> str:
        """Its id in the ledger."""
        return self.handle.turn_id

    async def wait(self, timeout_s: float = TURN_S) -> TurnResult:
        """Wait for its end, also a failed or cancelled one.

        Raises the typed refusal if the turn never opened, TimeoutError after `timeout_s` seconds,
        and SetupError if every worker process of the test has ended by itself.
        """
        waiting = asyncio.ensure_future(self.handle.wait())
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                await asyncio.wait((waiting,), timeout=_POLL_S)
                if waiting.done():
                    self.result = waiting.result()
                    return self.result
                self._check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._progress()} after {timeout_s:g} s")
        finally:
            waiting.cancel()

    async def cancel(self) -> None:
        """Ask for its cancellation; `wait` then says how it ended."""
        await self.handle.cancel()

    @property
    def status(self) -> TurnStatus | None:
        """`open`, `completed`, `failed` or `cancelled`; None before it is opened."""
        found = self._reader.turn(self.turn_id)
        return None if found is None else found.status

    @property
    def stop_reason(self) -> str | None:
        """Why it ended."""
        return self.details.turn.stop_reason

    @property
    def answer(self) -> str | None:
        """Its whole answer."""
        return self.details.turn.answer

    @property
    def details(self) -> TurnDetails:
        """All that happened in it, as `perdure turn show` tells it."""
        found = self._reader.details(self.turn_id)
        if found is None:
            raise AssertionError(f"the ledger does not know {self.turn_id}: it is not opened yet")
        return found

    @property
    def operations(self) -> tuple[OperationView, ...]:
        """Its tool calls in call order, with result and every execution."""
        return self.details.operations

    def operation(self, tool: str) -> OperationView:
        """Its only call of that tool. Raises AssertionError if there is none, or more than one."""
        found = [item for item in self.operations if item.tool == tool]
        if len(found) != 1:
            called = ", ".join(item.tool for item in self.operations) or "nothing"
            raise AssertionError(
                f"{self.turn_id} called {tool!r} {len(found)} times; it called: {called}"
            )
        return found[0]

    @property
    def events(self) -> list[LedgerEvent]:
        """What the ledger remembers of it, in order."""
        return [recorded.event for recorded in self._reader.turn_events(self.turn_id)]

    @property
    def transcript(self) -> list[Message]:
        """The messages of its conversation so far."""
        key = self.handle.key
        entries = self._reader.transcript(key.namespace, key.conversation_id)
        return [entry.message for entry in entries]

    def _progress(self) -> str:
        found = self._reader.turn(self.turn_id)
        if found is None:
            return f"{self.turn_id} is not opened: does a worker run on its task queue? Not ended"
        return f"{self.turn_id} is {found.status} at step {found.steps}, and has not ended"
