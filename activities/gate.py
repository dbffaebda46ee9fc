"""The gate in front of every effect: T1, the effect, T2 (DESIGN 5, promises P2 and P3).

Temporal may run this activity as often as it likes; the ledger decides whether the effect starts.
The effect itself runs in a task of its own that outlives the activity where Temporal merely timed
it out or paused it, so that a real result is never thrown away.
"""

import asyncio
import logging
import secrets
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.activities.engine import Engine
from perdure.activities.failures import retry_delay
from perdure.activities.pulse import Beating
from perdure.activities.results import outcome_of, outcome_of_error
from perdure.agents import NOT_EXECUTED, UNKNOWN, Tool, ToolContext
from perdure.contracts.calls import CallReply, CallReplyKind, CallTool, Settle
from perdure.contracts.errors import PerdureError, RecorderFull, Superseded, ToolError
from perdure.contracts.events import Observation, ToolCalled
from perdure.contracts.failpoints import failpoint
from perdure.contracts.limits import TOOL_PROGRESS_BYTES_MAX
from perdure.contracts.safety import (
    TOOL_ERROR_TRIES,
    LostEffect,
    ReplaySafety,
    after_lost_effect,
    backoff_s,
)
from perdure.contracts.timing import current_timing
from perdure.contracts.tools import ResultReason, ToolOutcome
from perdure.stores.closing import not_executed_outcome
from perdure.stores.commands import (
    CloseCall,
    DispatchCall,
    DispatchKind,
    DispatchReply,
    ReportReconcile,
    SettleCall,
)
from perdure.stores.operations import (
    close_call,
    dispatch_call,
    report_reconcile,
    settle_call,
    stop_attempt,
)
from perdure.stores.partials import append_tool_output

logger = logging.getLogger("perdure.activities")

_POLL_S_MAX = 0.5
# How often an effect that outlives its activity looks whether the worker stops.
_LOOK_S = 0.2


class EffectEnd(StrEnum):
    """How an execution ended, as the gate sees it."""

    SETTLED = "settled"
    RETRY = "retry"
    RECONCILE = "reconcile"
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"


@dataclass(frozen=True)
class EffectResult:
    """`retry_after_s` goes with RETRY, `seq` with SETTLED."""

    end: EffectEnd
    seq: int = 0
    retry_after_s: float = 0.0


class Gate:
    """One execution of a tool's activity."""

    def __init__(self, engine: Engine, call: CallTool, tool: Tool | None) -> None:
        self._engine = engine
        self._ledger = engine.ledger
        self._call = call
        self._ref = call.turn
        self._tool = tool
        # Random per execution: the same token again is a lost acknowledgement of this one.
        self._token = secrets.token_hex(16)
        self._stopping_since: float | None = None
        self._lost_ms = int(current_timing().holder_lost_s * 1000)

    async def run(self) -> CallReply:
        """Take the call through the gate and run the effect if it is ours to run."""
        assert self._tool is not None
        self._ledger.require(self._ref)
        with self._engine.pulse.beating(self._tool.name, activity.heartbeat) as beating:
            reply = await self._take()
            if reply.kind is not DispatchKind.MINE:
                return self._answer(reply)
            failpoint("tool.dispatched")
            result = await self._supervise(beating, reply)
            return self._finished(result)

    async def settle(self, settle: Settle) -> CallReply:
        """The gate without an effect: close a call that no worker runs, or wait for its holder."""
        self._ledger.require(self._ref)
        with self._engine.pulse.beating("settle", activity.heartbeat):
            while True:
                command = CloseCall(
                    turn=self._ref,
                    step=self._call.step,
                    index=self._call.index,
                    outcome=not_executed_outcome(settle.reason),
                    holder_lost_ms=self._lost_ms,
                )
                reply = await self._ledger.run_to_its_end(close_call, command)
                if reply.kind is DispatchKind.HELD and reply.holder_is_lost:
                    reply = await self._interrupt(reply, ResultReason.WORKER_LOST)
                if reply.kind is not DispatchKind.HELD:
                    return self._answer(reply)
                await asyncio.sleep(self._poll_s)

    async def reconcile(self) -> CallReply:
        """Ask the tool's own function what became of the lost generation, and record it."""
        assert self._tool is not None
        self._ledger.require(self._ref)
        with self._engine.pulse.beating(f"{self._tool.name} reconcile", activity.heartbeat):
            while True:
                reply = await self._ledger.run_to_its_end(dispatch_call, self._peek())
                if reply.kind is not DispatchKind.HELD or reply.rerun_allowed:
                    return self._answer(reply)
                if reply.holder_is_lost:
                    return self._answer(await self._ask_tool(reply))
                await asyncio.sleep(self._poll_s)

    @property
    def _poll_s(self) -> float:
        return min(_POLL_S_MAX, current_timing().heartbeat_timeout_s / 4)

    def _dispatch(self, rerun_of: int | None = None) -> DispatchCall:
        info = activity.info()
        assert self._tool is not None
        return DispatchCall(
            turn=self._ref,
            step=self._call.step,
            index=self._call.index,
            token=self._token,
            safety=self._tool.replay,
            worker=self._engine.worker,
            activity=f"{info.workflow_run_id}/{info.activity_id}",
            activity_attempt=info.attempt,
            holder_lost_ms=self._lost_ms,
            rerun_of=rerun_of,
        )

    def _peek(self) -> DispatchCall:
        return self._dispatch().model_copy(update={"only_looking": True})

    async def _take(self) -> DispatchReply:
        reply = await self._dispatch_once(self._dispatch())
        while reply.kind is DispatchKind.HELD:
            if reply.rerun_allowed:
                reply = await self._dispatch_once(self._dispatch(rerun_of=reply.generation))
                continue
            if reply.holder_is_lost:
                match after_lost_effect(reply.safety):
                    case LostEffect.INTERRUPT:
                        reply = await self._interrupt(reply, ResultReason.WORKER_LOST)
                        if reply.kind is not DispatchKind.HELD:
                            return reply
                        # The holder came back to life between two looks: wait for it.
                    case LostEffect.RECONCILE:
                        return reply
                    case LostEffect.RERUN:
                        # The holder was alive when T1 looked and is not any more: look again.
                        reply = await self._dispatch_once(self._dispatch())
                        continue
            await asyncio.sleep(self._poll_s)
            reply = await self._dispatch_once(self._dispatch())
        return reply

    async def _dispatch_once(self, command: DispatchCall) -> DispatchReply:
        try:
            return await self._ledger.run_to_its_end(dispatch_call, command)
        except asyncio.CancelledError:
            # The dispatch may be committed although nothing was started: say that nobody runs it.
            await self._stop_quietly()
            raise

    async def _interrupt(self, held: DispatchReply, reason: ResultReason) -> DispatchReply:
        command = CloseCall(
            turn=self._ref,
            step=self._call.step,
            index=self._call.index,
            outcome=not_executed_outcome(reason),
            generation=held.generation,
            holder_lost_ms=self._lost_ms,
        )
        return await self._ledger.run_to_its_end(close_call, command)

    async def _ask_tool(self, held: DispatchReply) -> DispatchReply:
        assert self._tool is not None
        assert held.called is not None
        context = self._context(held.called, held.generation, threading.Event())
        answer = await self._reconciled(held.called.arguments, context)
        observation, outcome = Observation.EXECUTED, None
        if answer is NOT_EXECUTED:
            observation = Observation.NOT_EXECUTED
        elif answer is UNKNOWN:
            observation = Observation.UNKNOWN
        else:
            outcome = outcome_of(answer)
        report = ReportReconcile(
            turn=self._ref,
            step=self._call.step,
            index=self._call.index,
            generation=held.generation,
            observation=observation,
            outcome=outcome,
        )
        return await self._ledger.run_to_its_end(report_reconcile, report)

    async def _reconciled(self, arguments: dict[str, Any], context: ToolContext) -> object:
        assert self._tool is not None
        timeout_s = self._tool.timeout_s or current_timing().tool_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._tool.run_reconcile(arguments, context)
        except Exception as error:  # An author's code: its text is not for Temporal.
            raise ApplicationError(
                f"the reconcile function raised {type(error).__name__}; it is asked again",
                type="reconcile_failed",
                category=ApplicationErrorCategory.BENIGN,
            ) from None

    async def _supervise(self, beating: Beating, reply: DispatchReply) -> EffectResult:
        assert self._tool is not None
        assert reply.called is not None
        beating.token = self._token
        flag = threading.Event()
        effect = Effect(self._engine, self._call, self._tool, self._token, reply, flag)
        task = self._engine.keep_running(effect.run(), f"perdure-effect-{reply.operation_id}")
        outliving = False
        while not task.done():
            try:
                await asyncio.wait({task}, timeout=_LOOK_S if outliving else None)
                if outliving and self._grace_is_over():
                    raise asyncio.CancelledError
            except asyncio.CancelledError:
                if self._runs_on(reply.safety):
                    outliving = True
                    continue
                flag.set()
                effect.cancel(stopping=activity.is_worker_shutdown())
                if await self._wait_after_cancel(task):
                    break
                # A plain tool is never killed: it runs on, and its result will be late.
                await self._stop_quietly()
                raise
        return task.result()

    def _runs_on(self, safety: ReplaySafety) -> bool:
        details = activity.cancellation_details()
        if details is None or details.cancel_requested or details.worker_shutdown:
            return False
        if self._grace_is_over():
            return False
        # Temporal timed the activity out, paused it, or forgot it after a reset.
        return safety in (ReplaySafety.UNSAFE, ReplaySafety.RECONCILED) or details.not_found

    def _grace_is_over(self) -> bool:
        if not activity.is_worker_shutdown():
            return False
        moment = asyncio.get_running_loop().time()
        if self._stopping_since is None:
            self._stopping_since = moment
        return moment - self._stopping_since >= self._engine.grace_s

    async def _wait_after_cancel(self, task: "asyncio.Task[EffectResult]") -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + current_timing().cancel_grace_s
        while not task.done() and loop.time() < deadline:
            try:
                await asyncio.wait({task}, timeout=deadline - loop.time())
            except asyncio.CancelledError:
                # A second cancellation (the worker stops) does not shorten the grace.
                continue
        return task.done()

    async def _stop_quietly(self) -> None:
        try:
            async with asyncio.timeout(current_timing().heartbeat_timeout_s):
                await self._ledger.run(stop_attempt, self._token)
        except (PerdureError, TimeoutError):
            logger.warning("a stopped execution could not be marked; its holder will look lost")

    def _finished(self, result: EffectResult) -> CallReply:
        match result.end:
            case EffectEnd.SETTLED:
                return CallReply(kind=CallReplyKind.SETTLED, seq=result.seq)
            case EffectEnd.RECONCILE:
                return CallReply(kind=CallReplyKind.RECONCILE)
            case EffectEnd.RETRY | EffectEnd.TIMED_OUT:
                raise ApplicationError(
                    "the tool reported an error and is tried again",
                    type=ToolError.code,
                    category=ApplicationErrorCategory.BENIGN,
                    next_retry_delay=retry_delay(result.retry_after_s),
                )
            case EffectEnd.STOPPED:
                raise asyncio.CancelledError

    def _answer(self, reply: DispatchReply) -> CallReply:
        match reply.kind:
            case DispatchKind.SETTLED:
                return CallReply(kind=CallReplyKind.SETTLED, seq=reply.seq)
            case DispatchKind.OVER:
                result = self._engine.shown(reply.result)
                return CallReply(kind=CallReplyKind.OVER, result=result)
            case DispatchKind.FENCED:
                return CallReply(kind=CallReplyKind.FOLLOW)
            case DispatchKind.HELD | DispatchKind.MINE:
                return CallReply(kind=CallReplyKind.RECONCILE, seq=reply.seq)

    def _context(self, called: ToolCalled, generation: int, flag: threading.Event) -> ToolContext:
        return tool_context(self._engine, called, generation, flag)


class Effect:
    """The effect of one generation and its T2: runs to its end whatever becomes of the activity."""

    def __init__(
        self,
        engine: Engine,
        call: CallTool,
        tool: Tool,
        token: str,
        reply: DispatchReply,
        flag: threading.Event,
    ) -> None:
        assert reply.called is not None
        self._engine = engine
        self._ledger = engine.ledger
        self._call = call
        self._tool = tool
        self._token = token
        self._called = reply.called
        self._generation = reply.generation
        self._safety = reply.safety
        self._errors = reply.errors
        self._flag = flag
        self._function: asyncio.Task[object] | None = None
        self._cancelled = False
        self._stopping = False

    def cancel(self, *, stopping: bool) -> None:
        """Cancel a coroutine tool; a plain one only sees its flag.

        `stopping`: its worker stops, which is no reason to write an outcome.
        """
        self._cancelled = True
        self._stopping = stopping
        if self._function is not None and self._tool.is_async:
            self._function.cancel()

    async def run(self) -> EffectResult:
        """Run the tool until its end or its time-out, then commit what it came to."""
        context = tool_context(self._engine, self._called, self._generation, self._flag)
        failpoint("tool.before_effect")
        self._function = asyncio.create_task(
            self._tool.run(self._called.arguments, context), name=f"perdure-tool-{self._tool.name}"
        )
        if self._cancelled and self._tool.is_async:
            self._function.cancel()
        timeout_s = self._tool.timeout_s
        if timeout_s is None:
            timeout_s = current_timing().tool_timeout_s
        await asyncio.wait({self._function}, timeout=timeout_s)
        if not self._function.done():
            return await self._timed_out(self._function)
        failpoint("tool.effect_done")
        return await self._ended(self._function)

    async def _ended(self, function: "asyncio.Task[object]") -> EffectResult:
        if function.cancelled():
            await self._ledger.run(stop_attempt, self._token)
            return EffectResult(EffectEnd.STOPPED)
        error = function.exception()
        rerun = self._safety in (ReplaySafety.SAFE, ReplaySafety.KEYED)
        if self._stopping and (rerun or error is not None):
            # How a tool ends when its worker stops says nothing about its effect.
            await self._ledger.run(stop_attempt, self._token)
            return EffectResult(EffectEnd.STOPPED)
        if error is None:
            return await self._settle(outcome_of(function.result()))
        return await self._failed(error)

    async def _failed(self, error: BaseException) -> EffectResult:
        reported = isinstance(error, ToolError)
        if self._safety is ReplaySafety.RECONCILED and not reported:
            await self._ledger.run(stop_attempt, self._token)
            return EffectResult(EffectEnd.RECONCILE)
        if self._safety in (ReplaySafety.SAFE, ReplaySafety.KEYED) and not self._cancelled:
            final = isinstance(error, (AssertionError, UnicodeError)) or (
                isinstance(error, ToolError) and not error.retryable
            )
            if not final and self._errors + 1 < TOOL_ERROR_TRIES:
                return await self._retry(error.retry_after_s if reported else None)
        unsafe = self._safety is ReplaySafety.UNSAFE
        return await self._settle(outcome_of_error(error, may_have_happened=unsafe))

    async def _retry(self, retry_after_s: float | None) -> EffectResult:
        await self._ledger.run(stop_attempt, self._token, "error")
        delay = backoff_s(self._errors + 1) if retry_after_s is None else retry_after_s
        return EffectResult(EffectEnd.RETRY, retry_after_s=delay)

    async def _timed_out(self, function: "asyncio.Task[object]") -> EffectResult:
        self._flag.set()
        if self._tool.is_async:
            function.cancel()
        self._engine.keep_running(self._keep_late(function), "perdure-late-result")
        if self._safety in (ReplaySafety.SAFE, ReplaySafety.KEYED):
            if self._errors + 1 < TOOL_ERROR_TRIES:
                return await self._retry(None)
            error = ToolError("the tool did not end within its time")
            return await self._settle(outcome_of_error(error, may_have_happened=False))
        await self._ledger.run(stop_attempt, self._token)
        if self._safety is ReplaySafety.RECONCILED:
            return EffectResult(EffectEnd.RECONCILE)
        command = CloseCall(
            turn=self._call.turn,
            step=self._call.step,
            index=self._call.index,
            outcome=not_executed_outcome(ResultReason.TIMED_OUT),
            generation=self._generation,
        )
        closed = await self._ledger.run(close_call, command)
        return EffectResult(EffectEnd.SETTLED, seq=closed.seq)

    async def _keep_late(self, function: "asyncio.Task[object]") -> None:
        # What still comes after the time-out is a fact: it goes to the late results.
        # An exception must be looked at, or the event loop logs what the tool said.
        await asyncio.wait({function})
        if function.cancelled() or function.exception() is not None:
            return
        if not self._tool.is_async or self._safety is ReplaySafety.UNSAFE:
            # What a cancelled coroutine returns is its clean-up's word; an UNSAFE call is closed.
            await self._settle(outcome_of(function.result()))

    async def _settle(self, outcome: ToolOutcome) -> EffectResult:
        command = SettleCall(
            turn=self._call.turn,
            operation_id=self._called.operation_id,
            token=self._token,
            generation=self._generation,
            outcome=outcome,
        )
        seq = await self._ledger.run(settle_call, command)
        return EffectResult(EffectEnd.SETTLED, seq=seq)


def tool_context(
    engine: Engine, called: ToolCalled, generation: int, flag: threading.Event
) -> ToolContext:
    """What the tool is given: its output is durable before `output` returns."""
    position, size = 1, 0

    async def output(text: str) -> None:
        nonlocal position, size
        size += len(text.encode("utf-8", "surrogatepass"))
        if size > TOOL_PROGRESS_BYTES_MAX:
            raise RecorderFull(f"one execution may report {TOOL_PROGRESS_BYTES_MAX} bytes")
        try:
            position = await engine.ledger.run(
                append_tool_output,
                called.turn_id,
                called.operation_id,
                generation,
                position,
                text,
            )
        except Superseded:
            # A zombie's progress is of no use to anybody, but it must not stop the zombie's effect.
            logger.info("late progress of %s is not kept", called.operation_id)

    return ToolContext(
        operation_id=called.operation_id,
        generation=generation,
        arguments=called.arguments,
        deps=engine.deps,
        namespace=called.namespace,
        conversation_id=called.conversation_id,
        turn_id=called.turn_id,
        output=output,
        cancelled=flag,
    )
