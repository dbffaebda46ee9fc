"""What is measured of turns, as facts; who takes them (metrics, traces) is set up by `worker.py`.

Without an observer nothing is measured. An observer that fails is logged and changes nothing: no
method here raises, waits for anything but the measured work, or decides. Facts carry content only
so that a tracer that was told to may send it; the log lines made here carry ids and codes.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure.contracts.errors import PerdureError
from perdure.contracts.events import ToolCalled
from perdure.contracts.model import ModelRequest, ModelResponse
from perdure.contracts.safety import LostEffect, ReplaySafety, after_lost_effect
from perdure.contracts.tools import ToolOutcome
from perdure.contracts.turn import TurnResult
from perdure.stores.commands import DispatchKind, DispatchReply
from perdure.stores.measured import EndedTurn, attempt_outcome, find_ended_turn

logger = logging.getLogger("perdure.activities")

Result = TypeVar("Result")

TIMED_OUT = "timed_out"

_TURNS_REMEMBERED = 4096
_ASKING_S_MAX = 1.0


class Recovery(StrEnum):
    """What brought a turn on after something was lost."""

    WORKER_LOST = "worker_lost"
    RERUN = "rerun"
    INTERRUPTED = "interrupted"
    SETTLED = "settled"
    LATE_RESULT = "late_result"
    TAKEN_OVER = "taken_over"
    TURN_LOST = "turn_lost"


@dataclass(eq=False)
class ModelCall:
    """One call of a model, from the request to the whole response."""

    request: ModelRequest
    response: ModelResponse | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class ToolRun:
    """One execution of a tool. `seconds` are the function's own; `end` is how the gate saw it."""

    agent: str
    called: ToolCalled
    generation: int
    safety: ReplaySafety
    end: str = ""
    outcome: ToolOutcome | None = None
    error: str = ""
    seconds: float = 0.0
    began_s: float = field(default_factory=time.perf_counter)

    def stop(self) -> None:
        """The function has ended; what follows is the ledger's time."""
        self.seconds = time.perf_counter() - self.began_s

    @property
    def status(self) -> str:
        """The result's status, or how the execution ended without one."""
        if self.outcome is None or self.end == TIMED_OUT:
            return self.end or self.error
        return self.outcome.status.value


Work = ModelCall | ToolRun
# Asks the ledger: `LedgerCalls.read`.
Read = Callable[..., Awaitable[Any]]


class Observer(Protocol):
    """Takes facts on the event loop's thread; must be quick and must not wait for anything."""

    def began(self, work: Work) -> None:
        """A call begins, in the task and context that run it."""
        ...

    def ended(self, work: Work) -> None:
        """It has ended; in the same context."""
        ...

    def turn_ended(self, turn: EndedTurn) -> None:
        """A turn has its outcome."""
        ...

    def recovered(self, kind: Recovery, turn_id: str) -> None:
        """Something was lost and the turn goes on."""
        ...

    def store_answered(self, command: str, seconds: float) -> None:
        """The ledger answered a command, or failed it."""
        ...

    def close(self) -> None:
        """Hand over what is left. Called in a thread, and given up when it takes long."""
        ...


class Telemetry:
    """The one object that everything measured is told to."""

    def __init__(self, observers: Collection[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self._asking: set[asyncio.Task[None]] = set()
        self._told: OrderedDict[str, None] = OrderedDict()
        self._broken: set[str] = set()

    @property
    def on(self) -> bool:
        """Whether anybody listens."""
        return bool(self._observers)

    async def model_call(
        self, request: ModelRequest, work: Awaitable[ModelResponse]
    ) -> ModelResponse:
        """Await a model's answer and tell what it came to."""
        if not self.on:
            return await work
        call = ModelCall(request)
        began_s = time.perf_counter()
        with self.during(call):
            try:
                call.response = await work
            finally:
                call.seconds = time.perf_counter() - began_s
        return call.response

    @contextmanager
    def during(self, work: Work) -> Generator[None]:
        """Tell that work begins and ends; what it raises is told by its code."""
        self._tell("began", work)
        try:
            yield
        except BaseException as error:
            # Also a cancellation is an end that is told; everything goes on as it was.
            work.error = error_code(error)
            raise
        finally:
            self._tell("ended", work)

    def store_answered(self, command: str, began_s: float) -> None:
        """A command that began at `began_s` (of `time.perf_counter`) was answered or failed."""
        self._tell("store_answered", command, time.perf_counter() - began_s)

    def recovered(self, kind: Recovery, turn_id: str) -> None:
        """Log and tell a recovery."""
        logger.info("recovery: %s", kind.value, extra={"turn": turn_id})
        self._tell("recovered", kind, turn_id)

    def interrupted(self, turn_id: str, reply: DispatchReply, *, lost: bool) -> None:
        """A call without an outcome was closed, if it was; `lost`: because its worker was."""
        if reply.kind is DispatchKind.SETTLED:
            if lost:
                self.recovered(Recovery.WORKER_LOST, turn_id)
            self.recovered(Recovery.INTERRUPTED, turn_id)

    def reconciled(self, turn_id: str, reply: DispatchReply, *, known: bool) -> None:
        """A reconcile function has answered; `known` says whether it knew the result."""
        if reply.kind is DispatchKind.SETTLED:
            self.recovered(Recovery.SETTLED if known else Recovery.INTERRUPTED, turn_id)

    def dispatched(self, read: Read, turn_id: str, reply: DispatchReply, closed_here: bool) -> None:
        """The gate has answered. A stored result was there already, unless this gate closed it;
        a later generation is a rerun, if one was lost and did not merely report an error."""
        if reply.kind is DispatchKind.SETTLED and not closed_here:
            self.recovered(Recovery.SETTLED, turn_id)
        elif reply.kind is DispatchKind.MINE and reply.generation > 1:
            self._ask(self._tell_rerun(read, turn_id, reply))

    def tool_settled(self, read: Read, called: ToolCalled, generation: int) -> None:
        """T2 was answered: ask whether this result came too late."""
        if self.on:
            self._ask(self._tell_late(read, called, generation))

    def turn_over(self, read: Read, turn_id: str, result: TurnResult | None = None) -> None:
        """A turn may have ended in this process: log it, and tell it once as the ledger has it."""
        if turn_id in self._told:
            return
        self._told[turn_id] = None
        if len(self._told) > _TURNS_REMEMBERED:
            self._told.popitem(last=False)
        if result is not None:
            ids = {"turn": turn_id}
            logger.info("turn %s: %s", result.status.value, result.stop_reason, extra=ids)
        if self.on:
            self._ask(self._tell_turn(read, turn_id))

    def turn_lost(self, read: Read, turn_id: str) -> None:
        """A dead turn was ended by the turn that takes its conversation."""
        self.recovered(Recovery.TURN_LOST, turn_id)
        self.turn_over(read, turn_id)

    async def close(self, timeout_s: float) -> None:
        """Let the observers hand over what they have, for at most that long together."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=min(timeout_s, _ASKING_S_MAX))
        for task in list(self._asking):
            task.cancel()
        # Not a pool: the interpreter would wait for its threads, however long a collector hangs.
        closing = [_in_thread(observer.close) for observer in self._observers]
        if closing:
            await asyncio.wait(closing, timeout=timeout_s)

    async def _tell_rerun(self, read: Read, turn_id: str, reply: DispatchReply) -> None:
        before = await read(attempt_outcome, reply.operation_id, reply.generation - 1)
        if before == "error":
            # The tool reported an error and is tried again: nothing was lost.
            return
        if after_lost_effect(reply.safety) is LostEffect.RERUN:
            self.recovered(Recovery.WORKER_LOST, turn_id)
        self.recovered(Recovery.RERUN, turn_id)

    async def _tell_late(self, read: Read, called: ToolCalled, generation: int) -> None:
        if await read(attempt_outcome, called.operation_id, generation) == "late":
            self.recovered(Recovery.LATE_RESULT, called.turn_id)

    async def _tell_turn(self, read: Read, turn_id: str) -> None:
        turn = await read(find_ended_turn, turn_id)
        if turn is not None:
            self._tell("turn_ended", turn)

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(question), name="perdure-telemetry")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def _tell(self, method: str, *facts: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, method)(*facts)
            except Exception as error:  # Whatever breaks in measuring, the turn goes on.
                name = f"{type(observer).__name__}.{method}"
                if name not in self._broken:
                    self._broken.add(name)
                    logger.warning("%s failed: %s; said once", name, type(error).__name__)


def error_code(error: BaseException) -> str:
    """A short code for what was raised: ours, or the name of the class."""
    if isinstance(error, PerdureError):
        return error.code
    if isinstance(error, ApplicationError):
        return error.type or "internal_error"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def agent_of_activity() -> str:
    """The agent whose tool this activity is; its type is `<agent>.<tool>`."""
    return activity.info().activity_type.rpartition(".")[0]


async def _quietly(question: Coroutine[Any, Any, None]) -> None:
    try:
        await question
    except Exception as error:  # A question that cannot be answered is a number less.
        logger.info("a measurement is missing: %s", type(error).__name__)


def _in_thread(work: Callable[[], None]) -> "asyncio.Future[None]":
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # The thread's edge: nobody else would see it.
            logger.warning("telemetry could not be handed over: %s", type(error).__name__)
        # The worker does not wait for ever: its loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set, done)

    threading.Thread(target=run, name="perdure-telemetry-close", daemon=True).start()
    return done


def _set(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)
