"""Signs of life, sent from a thread of their own (DESIGN 5).

Per running activity: a heartbeat to Temporal, and for the holder of an operation the renewal of its
`alive_at` in the ledger. Both stop when the event loop has not answered for a heartbeat time-out,
and the log then names what was running: a tool that blocks the loop is not alive.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from perdure.contracts.errors import PerdureError
from perdure.contracts.timing import current_timing
from perdure.stores.engine import Store
from perdure.stores.operations import renew_attempts

logger = logging.getLogger("perdure.activities")

_BEAT_S_MAX = 1.0


@dataclass(eq=False)
class Beating:
    """One running activity; `token` is set while it holds an operation."""

    name: str
    heartbeat: Callable[[], None]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    token: str | None = None
    renewed_s: float = field(default_factory=time.monotonic)


class Pulse:
    """Beats for every registered activity until it is closed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._beating: set[Beating] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._answered_s = time.monotonic()
        self._warned = False
        self._renewing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="perdure-pulse", daemon=True)
        self._thread.start()

    @contextmanager
    def beating(self, name: str, heartbeat: Callable[[], None]) -> Generator[Beating]:
        """Beat for the current activity while the block runs."""
        entry = Beating(
            name=name,
            heartbeat=heartbeat,
            context=contextvars.copy_context(),
            loop=asyncio.get_running_loop(),
        )
        with self._lock:
            if not self._beating:
                self._answered_s = time.monotonic()
            self._beating.add(entry)
        try:
            yield entry
        finally:
            with self._lock:
                self._beating.discard(entry)

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(timeout=_BEAT_S_MAX)

    def _run(self) -> None:
        while not self._stop.wait(min(_BEAT_S_MAX, current_timing().heartbeat_timeout_s / 5)):
            with self._lock:
                entries = list(self._beating)
            if entries and self._loop_answers(entries):
                self._beat(entries)

    def _loop_answers(self, entries: list[Beating]) -> bool:
        try:
            entries[0].loop.call_soon_threadsafe(self._note_answer)
        except RuntimeError:
            return False
        silent_s = time.monotonic() - self._answered_s
        if silent_s <= current_timing().heartbeat_timeout_s:
            self._warned = False
            return True
        if not self._warned:
            self._warned = True
            names = ", ".join(sorted({entry.name for entry in entries}))
            logger.error("the event loop has not answered for %.0f s; running: %s", silent_s, names)
        return False

    def _note_answer(self) -> None:
        self._answered_s = time.monotonic()

    def _beat(self, entries: list[Beating]) -> None:
        moment = time.monotonic()
        for entry in entries:
            try:
                entry.loop.call_soon_threadsafe(entry.heartbeat, context=entry.context)
            except RuntimeError:
                return
        due = [
            entry
            for entry in entries
            if entry.token and moment - entry.renewed_s >= current_timing().alive_renewal_s
        ]
        # In a thread of its own: a locked database must not silence the heartbeats.
        if due and self._renewing.acquire(blocking=False):
            threading.Thread(
                target=self._renew, args=(due, moment), name="perdure-renewal", daemon=True
            ).start()

    def _renew(self, due: list[Beating], moment: float) -> None:
        try:
            self._store.transact(renew_attempts, [entry.token for entry in due if entry.token])
            for entry in due:
                entry.renewed_s = moment
        except PerdureError as error:
            # Tried again at the next beat; a holder that cannot reach the ledger counts as lost.
            logger.warning("signs of life could not be written: %s", error)
        except Exception as error:  # The thread's edge: whatever it is, the next beat tries again.
            logger.warning("signs of life could not be written: %s", type(error).__name__)
        finally:
            self._renewing.release()
