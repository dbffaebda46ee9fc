"""The effect of one generation and its T2 (DESIGN 5).

It runs in a task of its own and goes to its end whatever becomes of the activity that started it.
What an end comes to depends on the replay safety and on why it ended; whether it may start at all
is the gate's business.
"""

import asyncio
import logging
import threading
from dataclasses import dataclass
from enum import StrEnum

from perdure.activities.engine import Engine
from perdure.activities.results import outcome_of, outcome_of_error
from perdure.activities.telemetry import TIMED_OUT, ToolRun, agent_of_activity
from perdure.agents import Tool, ToolContext
from perdure.contracts.calls import CallTool
from perdure.contracts.errors import RecorderFull, Superseded, ToolError
from perdure.contracts.events import ToolCalled
from perdure.contracts.failpoints import failpoint
from perdure.contracts.limits import TOOL_PROGRESS_BYTES_MAX
from perdure.contracts.safety import (
    TOOL_ERROR_TRIES,
    ReplaySafety,
    backoff_s,
)
from perdure.contracts.timing import current_timing
from perdure.contracts.tools import ResultReason, ResultStatus, ToolOutcome
from perdure.stores.closing import not_executed_outcome
from perdure.stores.commands import (
    CloseCall,
    DispatchReply,
    SettleCall,
)
from perdure.stores.operations import (
    close_call,
    settle_call,
    stop_attempt,
)
from perdure.stores.partials import append_tool_output

logger = logging.getLogger("perdure.activities")


class EffectEnd(StrEnum):
    """How an execution ended, as the gate sees it."""

    SETTLED = "settled"
    RETRY = "retry"
    RECONCILE = "reconcile"
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"


@dataclass(frozen=True)
class EffectResult:
    """`retry_after_s` goes with RETRY, `seq` and `status` with SETTLED."""

    end: EffectEnd
    seq: int = 0
    status: ResultStatus = ResultStatus.OK
    retry_after_s: float = 0.0


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
        agent = agent_of_activity()
        self._seen = ToolRun(agent, self._called, self._generation, self._safety)

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
        with self._engine.telemetry.during(self._seen):
            result = await self._run()
            self._seen.end = self._seen.end or result.end.value
            return result

    async def _run(self) -> EffectResult:
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
        self._seen.stop()
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
        # A KEYED tool that reports its failure knows; any other exception leaves it open.
        doubtful = self._safety is ReplaySafety.UNSAFE or (
            self._safety is ReplaySafety.KEYED and not reported
        )
        return await self._settle(outcome_of_error(error, may_have_happened=doubtful))

    async def _retry(self, retry_after_s: float | None) -> EffectResult:
        await self._ledger.run(stop_attempt, self._token, "error")
        delay = backoff_s(self._errors + 1) if retry_after_s is None else retry_after_s
        return EffectResult(EffectEnd.RETRY, retry_after_s=delay)

    async def _timed_out(self, function: "asyncio.Task[object]") -> EffectResult:
        self._flag.set()
        self._seen.end = TIMED_OUT
        if self._tool.is_async:
            function.cancel()
        self._engine.keep_running(self._keep_late(function), "perdure-late-result")
        if self._safety in (ReplaySafety.SAFE, ReplaySafety.KEYED):
            if self._errors + 1 < TOOL_ERROR_TRIES:
                return await self._retry(None)
            error = ToolError("the tool did not end within its time")
            keyed = self._safety is ReplaySafety.KEYED
            return await self._settle(outcome_of_error(error, may_have_happened=keyed))
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
        self._engine.telemetry.interrupted(self._call.turn.turn_id, closed, lost=False)
        return EffectResult(EffectEnd.SETTLED, closed.seq, ResultStatus.INTERRUPTED)

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
        self._seen.outcome = outcome
        self._engine.telemetry.tool_settled(self._ledger.read, self._called, self._generation)
        return EffectResult(EffectEnd.SETTLED, seq, outcome.status)


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
