"""`AgentTurn`: one agent turn as one workflow. It waits, calls and carries one state object.

What comes next is decided in `_decide`; what happened is in the ledger. No code of a user runs here
and no transcript passes through (promise P9).
"""

import asyncio
from typing import Any, Final

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, is_cancelled_exception

from perdure.contracts.calls import (
    CALL_MODEL,
    END,
    FOLLOW_TURN,
    SETTLE,
    CallModel,
    CallRef,
    CallReply,
    CallTool,
    EndReply,
    EndTurn,
    FollowReply,
    FollowTurn,
    Opening,
    Settle,
    StepReply,
    reconcile_contract,
    tool_contract,
)
from perdure.contracts.errors import InvalidRequest
from perdure.contracts.limits import CONTINUE_AS_NEW_BYTES, CONTINUE_AS_NEW_EVENTS
from perdure.contracts.messages import Message, Role
from perdure.contracts.search import ENDED_ATTRIBUTES, search_attributes
from perdure.contracts.timing import START_TO_CLOSE_MARGIN_S, current_timing
from perdure.contracts.turn import (
    WHAT_NEXT,
    StopReason,
    TurnResult,
    TurnStatus,
    parse_turn_request,
)
from perdure.workflows import _decide as decide
from perdure.workflows import _timeline as timeline
from perdure.workflows._call import LOST, attempt
from perdure.workflows._decide import CallPhase, CallState, Ending, Phase, Problem, TurnState

FOLLOWING_CANCELLED: Final = "following_cancelled"
_ENDED: Final = (Phase.DONE, Phase.REFUSED)


@workflow.defn(name="AgentTurn")
class AgentTurn:
    """Input: the JSON object of `TurnRequest`. Result: the JSON object of `TurnResult`."""

    def __init__(self) -> None:
        self._cancel_requested = False
        self._published = False

    @workflow.run
    async def run(self, *inputs: Any) -> dict[str, Any]:
        """Run the turn to its recorded end.

        Fails with the stop reason as type where the turn failed, with the code of an
        `InvalidRequest` where the input is refused; the failure's details hold the result.
        """
        state = self._state(inputs)
        while state.phase not in _ENDED:
            workflow.set_current_details(timeline.details(state))
            self._continue_as_new_if_long(state)
            try:
                state = await self._advance(state)
            except BaseException as error:
                # Only a cancellation is ours to decide on; everything else is a bug and parks.
                if not is_cancelled_exception(error):
                    raise
                self._cancel_requested = True
                _log("cancel requested", state)
                state = decide.after_cancel(state)
            self._publish(state)
        state = timeline.noted(state, [timeline.end_line(state)], workflow.now())
        workflow.set_current_details(timeline.details(state))
        return self._outcome(state)

    def _state(self, inputs: tuple[Any, ...]) -> TurnState:
        info = workflow.info()
        try:
            if len(inputs) == 2 and info.continued_run_id is not None:
                return TurnState.model_validate(inputs[1])
            if len(inputs) != 1:
                raise InvalidRequest(
                    f"the workflow takes one JSON object, not {len(inputs)} arguments"
                )
            request = parse_turn_request(inputs[0])
        except InvalidRequest as error:
            raise ApplicationError(str(error), type=error.code, non_retryable=True) from None
        return decide.begin(request, info.first_execution_run_id)

    async def _advance(self, state: TurnState) -> TurnState:
        match state.phase:
            case Phase.MODEL:
                happened = await self._call_model(state)
                lines = timeline.step_lines(state, happened)
                return decide.after_model(timeline.noted(state, lines, workflow.now()), happened)
            case Phase.TOOLS:
                ended = await self._run_calls(state)
                lines = [line for call in ended for line in timeline.call_lines(call)]
                replies = [call.reply for call in ended if call.reply is not None]
                return decide.after_tools(timeline.noted(state, lines, workflow.now()), replies)
            case Phase.FOLLOW:
                return decide.after_follow(state, await self._follow(state), _reopening(state))
            case Phase.END:
                return decide.after_end(state, await _to_its_end(self._end(state)))
            case Phase.DONE | Phase.REFUSED:
                raise AssertionError(f"nothing follows {state.phase}")

    async def _call_model(self, state: TurnState) -> StepReply | Problem:
        value = CallModel(turn=state.turn, step=state.step, opening=state.opening)
        reply = await attempt(CALL_MODEL, value, summary=f"model · step {state.step}")
        if isinstance(reply, Problem) and reply.code == LOST:
            return reply.model_copy(update={"code": StopReason.MODEL_LOST.value})
        return reply

    async def _run_calls(self, state: TurnState) -> list[CallState]:
        tasks = [asyncio.create_task(self._run_call(state, call)) for call in state.calls]
        if not tasks:
            return []
        for task in tasks:
            # A call that is given up may still fail, and nobody is left to be told.
            task.add_done_callback(_retrieve)
        try:
            # Not a gather: cancelled, it would wait for the slowest tool, however long that takes.
            await workflow.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            # Tools get a short while to end; what comes later is a late result.
            self._cancel_requested = True
            for task in tasks:
                task.cancel()
            grace_s = current_timing().cancel_grace_s
            await _to_its_end(workflow.wait(tasks, timeout=grace_s))
            raise
        return [task.result() for task in tasks if task.done()]

    async def _run_call(self, state: TurnState, call: CallRef) -> CallState:
        current = CallState(call=call)
        while current.phase is not CallPhase.DONE:
            if self._cancel_requested:
                # The activity was lost and took the cancellation with it: nothing runs again.
                raise asyncio.CancelledError
            if current.delay_s:
                await workflow.sleep(current.delay_s)
            current = decide.after_call(current, await self._call_once(state, current))
        return current

    async def _call_once(self, state: TurnState, current: CallState) -> CallReply | Problem:
        call = current.call
        value = CallTool(turn=state.turn, step=state.step, index=call.index)
        about = f"{call.tool} · {call.safety}"
        match current.phase:
            case CallPhase.RUN:
                contract = tool_contract(state.agent, call.tool, call.safety)
                summary = f"{about} · {call.preview}" if call.preview else about
            case CallPhase.RECONCILE:
                contract = reconcile_contract(state.agent, call.tool)
                summary = f"{about} · what became of it?"
            case CallPhase.SETTLE:
                settle = Settle(turn=state.turn, step=state.step, index=call.index)
                return await attempt(SETTLE, settle, summary=f"{about} · settle")
            case CallPhase.DONE:
                raise AssertionError("a settled call is not run again")
        timeout_s = current_timing().tool_timeout_s if call.timeout_s is None else call.timeout_s
        return await attempt(
            contract,
            value,
            summary=summary,
            start_to_close_s=timeout_s + START_TO_CLOSE_MARGIN_S,
            waits_for_cancel=True,
        )

    async def _follow(self, state: TurnState) -> FollowReply:
        run_id = workflow.info().first_execution_run_id
        _log("follows another owner", state)
        reply = await attempt(
            FOLLOW_TURN,
            FollowTurn(turn=state.turn, run_id=run_id),
            summary="another workflow runs this turn",
        )
        # Retried for ever: a problem is a failure that no retry can mend.
        return reply if isinstance(reply, FollowReply) else _parked(reply)

    async def _end(self, state: TurnState) -> EndReply | Problem:
        ending = state.ending or Ending(status=TurnStatus.FAILED, stop_reason="unknown")
        value = EndTurn(
            turn=state.turn,
            run_id=workflow.info().first_execution_run_id,
            status=ending.status,
            stop_reason=ending.stop_reason,
            detail=ending.detail,
            opening=_without_message(state),
        )
        reply = await attempt(END, value, summary=f"end · {ending.stop_reason}")
        if isinstance(reply, Problem) and not decide.is_refused(state, reply):
            return _parked(reply)
        return reply

    def _publish(self, state: TurnState) -> None:
        """Set the search attributes where the server knows them: once it runs, and at its end."""
        ended = state.phase in _ENDED
        unopened = ended and state.result is None
        if not state.searchable or unopened or (self._published and not ended):
            return
        values = search_attributes(state.turn, state.agent, state.result)
        if self._published:
            values = {name: values[name] for name in ENDED_ATTRIBUTES}
        self._published = True
        updates = [SearchAttributeKey.for_keyword(name).value_set(values[name]) for name in values]
        # pyright does not know the type of the SDK's own union.
        workflow.upsert_search_attributes(updates)  # pyright: ignore[reportUnknownMemberType]

    def _continue_as_new_if_long(self, state: TurnState) -> None:
        info = workflow.info()
        long = (
            info.get_current_history_length() >= CONTINUE_AS_NEW_EVENTS
            or info.get_current_history_size() >= CONTINUE_AS_NEW_BYTES
        )
        # Only between steps: nothing is open then.
        if long and state.phase in (Phase.MODEL, Phase.FOLLOW):
            _log("continues as new", state)
            encoded = state.model_dump(mode="json", exclude_defaults=True)
            workflow.continue_as_new(args=[None, encoded])

    def _outcome(self, state: TurnState) -> dict[str, Any]:
        result = state.result
        if result is None:
            if state.ending is None:
                # Not CANCELED, which says that the turn was: it goes on elsewhere.
                raise ApplicationError(
                    "this workflow only followed the turn, which goes on elsewhere",
                    type=FOLLOWING_CANCELLED,
                    non_retryable=True,
                )
            raise ApplicationError(
                state.ending.detail, type=state.ending.stop_reason, non_retryable=True
            )
        encoded = result.model_dump(mode="json", exclude_none=True)
        if result.status is TurnStatus.COMPLETED:
            return encoded
        if result.status is TurnStatus.CANCELLED and self._cancel_requested:
            raise asyncio.CancelledError
        raise ApplicationError(
            _failure_text(state, result),
            encoded,
            type=result.stop_reason,
            non_retryable=True,
        )


def _log(said: str, state: TurnState) -> None:
    workflow.logger.info(said, extra={"turn": state.turn.turn_id, "step": state.step})


def _failure_text(state: TurnState, result: TurnResult) -> str:
    known = state.ending.detail if state.ending is not None else ""
    said = [f"the turn ended {result.status.value}: {result.stop_reason}", known]
    said.append(WHAT_NEXT.get(result.stop_reason, ""))
    return ". ".join(part for part in said if part)


def _retrieve(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


def _without_message(state: TurnState) -> Opening | None:
    # The caller's input and the first activity hold the message: `end` looks there if it must.
    told = {"message": Message(role=Role.USER), "request_digest": state.request_digest}
    return state.opening and state.opening.model_copy(update=told)


def _reopening(state: TurnState) -> Opening:
    if state.opening is not None:
        return state.opening
    # The turn is known to be open, so its message is in the ledger and need not be sent again.
    return Opening(
        agent=state.agent,
        message=Message(role=Role.USER),
        request_digest=state.request_digest,
        run_id=workflow.info().first_execution_run_id,
    )


def _parked(problem: Problem) -> Any:
    raise AssertionError(f"an activity that is retried for ever ended: {problem.code}")


async def _to_its_end(work: Any) -> Any:
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # A second cancellation does not stop what ends the turn.
            if task.cancelled():
                raise
    return task.result()
