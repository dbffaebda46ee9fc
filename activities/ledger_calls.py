"""Running ledger commands from coroutines: in a small thread pool, retried until they are answered.

A database that is away is not a failure of a tool or a model: the command is simply given again,
while the activity goes on heartbeating, until the activity itself is cancelled (DESIGN 5).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from perdure.activities.telemetry import Telemetry
from perdure.contracts.calls import TurnRef
from perdure.contracts.errors import StoreUnavailable
from perdure.stores.engine import Connection, Store
from perdure.stores.ledger import check_store, read_result

logger = logging.getLogger("perdure.activities")

Args = ParamSpec("Args")
Result = TypeVar("Result")

_FIRST_DELAY_S = 0.05
_DELAY_MAX_S = 2.0
_THREADS = 8


class LedgerCalls:
    """The ledger as activities use it."""

    def __init__(self, store: Store, telemetry: Telemetry | None = None) -> None:
        self.store = store
        self._telemetry = telemetry if telemetry is not None else Telemetry()
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="perdure-store")

    @property
    def store_id(self) -> str:
        """The ledger's identity."""
        return self.store.store_id

    def require(self, ref: TurnRef) -> None:
        """Raises WrongStore if the turn lives in another ledger."""
        check_store(self.store.store_id, ref)

    async def run(
        self,
        command: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run a command in a transaction of its own; a lost acknowledgement is asked for again."""

        def call() -> Result:
            return self.store.transact(command, *args, **kwargs)

        return await self._until_answered(command.__name__, call)

    async def read(
        self,
        query: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run a query."""

        def call() -> Result:
            return self.store.read(query, *args, **kwargs)

        return await self._until_answered(query.__name__, call)

    async def run_to_its_end(
        self,
        command: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run a command that a cancellation must not leave half known; the cancellation follows.

        Once cancelled, a ledger that does not answer is not asked again: its commands are safe to
        be left unanswered, and a worker must be able to stop without its database.
        """
        giving_up = asyncio.Event()

        def call() -> Result:
            return self.store.transact(command, *args, **kwargs)

        answered = self._until_answered(command.__name__, call, giving_up)
        return await to_its_end(answered, giving_up)

    async def probe(self) -> None:
        """Ask the ledger once for nothing. Raises StoreUnavailable and the like at once."""

        def call() -> object:
            return self.store.read(read_result, "")

        await self._once("probe", call)

    def close(self) -> None:
        """Stop the threads; running commands end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _until_answered(
        self, name: str, call: Callable[[], Result], giving_up: asyncio.Event | None = None
    ) -> Result:
        delay = _FIRST_DELAY_S
        while True:
            try:
                return await self._once(name, call)
            except StoreUnavailable as error:
                if giving_up is not None and giving_up.is_set():
                    raise
                logger.warning("the ledger does not answer, trying again: %s", error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, _DELAY_MAX_S)

    async def _once(self, name: str, call: Callable[[], Result]) -> Result:
        began_s = time.perf_counter()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        finally:
            self._telemetry.store_answered(name, began_s)


async def to_its_end(work: Awaitable[Result], giving_up: asyncio.Event | None = None) -> Result:
    """Await `work` also through cancellations, then let the cancellation go on.

    `giving_up` is set by the first cancellation, for work that can then end sooner.
    """
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
            if giving_up is not None:
                giving_up.set()
        except BaseException:
            # The task's own failure is raised by `result` below, after the loop.
            break
    if cancelled is not None:
        if not task.cancelled():
            # Retrieved, so that a failure is not reported as forgotten.
            task.exception()
        raise cancelled
    return task.result()
