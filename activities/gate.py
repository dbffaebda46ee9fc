"""The gate in front of every effect: T1, the effect, T2 (DESIGN 5, promises P2 and P3).

Temporal may run this activity as often as it likes; the ledger decides whether the effect starts.
The effect itself runs in a task of its own that outlives the activity where Temporal merely timed
it out or paused it, so that a real result is never thrown away.
"""

import asyncio
import logging
import secrets
import threading
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.activities.effect import Effect, EffectEnd, EffectResult, tool_context
from perdure.activities.engine import Engine
from perdure.activities.failures import retry_delay
from perdure.activities.pulse import Beating
from perdure.activities.results import outcome_of
from perdure.agents import NOT_EXECUTED, UNKNOWN, Tool, ToolContext
from perdure.contracts.calls import CallReply, CallReplyKind, CallTool, Settle
from perdure.contracts.errors import PerdureError, ToolError
from perdure.contracts.events import Observation
from perdure.contracts.failpoints import failpoint
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.safety import (
    LostEffect,
    ReplaySafety,
    after_lost_effect,
)
from perdure.contracts.timing import current_timing
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.stores.call_facts import call_facts
from perdure.stores.closing import not_executed_outcome
from perdure.stores.commands import (
    CloseCall,
    DispatchCall,
    DispatchKind,
    DispatchReply,
    ReportReconcile,
)
from perdure.stores.operations import (
    close_call,
    dispatch_call,
    report_reconcile,
    stop_attempt,
)

logger = logging.getLogger("perdure.activities")

_ORDINARY = (ResultStatus.OK, ResultStatus.ERROR)
_POLL_S_MAX = 0.5
# How often an effect that outlives its activity looks whether the worker stops.
_LOOK_S = 0.2


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
        self._closed_here = False
        self._lost_ms = int(current_timing().holder_lost_s * 1000)

    async def run(self) -> CallReply:
        """Take the call through the gate and run the effect if it is ours to run."""
        assert self._tool is not None
        self._ledger.require(self._ref)
        with self._engine.pulse.beating(self._tool.name, activity.heartbeat) as beating:
            reply = await self._take()
            self._engine.telemetry.dispatched(
                self._ledger.read, self._ref.turn_id, reply, self._closed_here
            )
            if reply.kind is not DispatchKind.MINE:
                return await self._told(self._answer(reply))
            failpoint("tool.dispatched")
            result = await self._supervise(beating, reply)
            answer = self._finished(result)
            ordinary = reply.generation == 1 and result.status in _ORDINARY
            return answer if ordinary else await self._told(answer)

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
                    return await self._told(self._answer(reply))
                await asyncio.sleep(self._poll_s)

    async def reconcile(self) -> CallReply:
        """Ask the tool's own function what became of the lost generation, and record it."""
        assert self._tool is not None
        self._ledger.require(self._ref)
        with self._engine.pulse.beating(f"{self._tool.name} reconcile", activity.heartbeat):
            while True:
                reply = await self._ledger.run_to_its_end(dispatch_call, self._peek())
                if reply.kind is not DispatchKind.HELD or reply.rerun_allowed:
                    return await self._told(self._answer(reply))
                if reply.holder_is_lost:
                    return await self._told(self._answer(await self._ask_tool(reply)))
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
        reply = await self._ledger.run_to_its_end(close_call, command)
        self._closed_here = True
        self._engine.telemetry.interrupted(self._ref.turn_id, reply, lost=True)
        return reply

    async def _ask_tool(self, held: DispatchReply) -> DispatchReply:
        assert self._tool is not None
        assert held.called is not None
        context = tool_context(self._engine, held.called, held.generation, threading.Event())
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
        reply = await self._ledger.run_to_its_end(report_reconcile, report)
        self._engine.telemetry.reconciled(self._ref.turn_id, reply, known=outcome is not None)
        return reply

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

    async def _told(self, answer: CallReply) -> CallReply:
        """The reply with what an operator wants to know of a call that went no ordinary way."""
        if answer.kind is not CallReplyKind.SETTLED:
            return answer
        operation_id = derive_operation_id(self._ref.turn_id, self._call.step, self._call.index)
        facts = await self._ledger.read(call_facts, operation_id)
        return answer if facts is None else answer.model_copy(update=facts._asdict())

    def _finished(self, result: EffectResult) -> CallReply:
        match result.end:
            case EffectEnd.SETTLED:
                return CallReply(kind=CallReplyKind.SETTLED, seq=result.seq, status=result.status)
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
