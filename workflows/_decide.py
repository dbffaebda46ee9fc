"""Everything an agent turn decides, as pure functions of its state and what just happened.

The workflow decides only *which activity comes next*; all else is read from the ledger in the
transaction that acts on it (DESIGN 1). Nothing here waits, calls or knows Temporal.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from perdure.contracts.calls import (
    CallRef,
    CallReply,
    CallReplyKind,
    EndReply,
    FollowReply,
    Opening,
    StepKind,
    StepReply,
    TurnRef,
)
from perdure.contracts.errors import ERROR_CODES_AT_OPENING, LEDGER_FAILURE_CODES
from perdure.contracts.safety import (
    RESCHEDULE_DELAYS_S,
    TEMPORAL_ATTEMPTS_MAX,
    backoff_s,
)
from perdure.contracts.turn import StopReason, TurnRequest, TurnResult, TurnStatus


class Phase(StrEnum):
    """What the turn does next."""

    MODEL = "model"
    TOOLS = "tools"
    FOLLOW = "follow"
    END = "end"
    DONE = "done"
    REFUSED = "refused"


class Ending(BaseModel):
    """How the turn is to be ended."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    status: TurnStatus
    stop_reason: str
    detail: str = ""


class TurnState(BaseModel):
    """All a turn carries, also through continue-as-new. `opening` goes once the turn is open."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    phase: Phase = Phase.MODEL
    turn: TurnRef
    agent: str
    step: int = 1
    request_digest: str = ""
    opening: Opening | None = None
    calls: tuple[CallRef, ...] = ()
    ending: Ending | None = None
    result: TurnResult | None = None
    searchable: bool = False
    timeline: tuple[str, ...] = ()


class Problem(BaseModel):
    """Why an activity ended without a reply: our code, or Temporal's kind of failure."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    code: str
    detail: str = ""


class CallPhase(StrEnum):
    """What one call does next."""

    RUN = "run"
    RECONCILE = "reconcile"
    SETTLE = "settle"
    DONE = "done"


class CallState(BaseModel):
    """One call on its way through the gate; `delay_s` is waited for before it goes on."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    call: CallRef
    phase: CallPhase = CallPhase.RUN
    looked: bool = False
    lost: int = 0
    rounds: int = 0
    delay_s: float = 0.0
    reply: CallReply | Problem | None = None


def begin(request: TurnRequest, run_id: str) -> TurnState:
    """The state of a new turn."""
    opening = Opening(
        agent=request.agent,
        message=request.message,
        tools=request.tools,
        limits=request.limits,
        parameters=request.parameters,
        run_id=run_id,
    )
    ref = TurnRef(**request.key.model_dump())
    return TurnState(turn=ref, agent=request.agent, request_digest=request.digest, opening=opening)


def after_model(state: TurnState, happened: StepReply | Problem) -> TurnState:
    """What follows a model step."""
    if isinstance(happened, Problem):
        return _after_problem(state, happened)
    if happened.searchable:
        state = state.model_copy(update={"searchable": True})
    match happened.kind:
        case StepKind.OVER:
            return _done(state, happened.result)
        case StepKind.FOLLOW:
            return state.model_copy(update={"phase": Phase.FOLLOW})
        case StepKind.CALLS:
            ref = state.turn.model_copy(
                update={
                    "epoch": happened.epoch,
                    "store": happened.store,
                    "seq": max(state.turn.seq, happened.seq),
                }
            )
            return state.model_copy(
                update={
                    "phase": Phase.TOOLS,
                    "turn": ref,
                    "agent": happened.agent,
                    "opening": None,
                    "calls": happened.calls,
                }
            )


def after_tools(state: TurnState, happened: list[CallReply | Problem]) -> TurnState:
    """What follows when every call of the step is settled, or one of them says the turn is over."""
    replies = [reply for reply in happened if isinstance(reply, CallReply)]
    over = next((reply for reply in replies if reply.kind is CallReplyKind.OVER), None)
    if over is not None:
        return _done(state, over.result)
    problem = next((reply for reply in happened if isinstance(reply, Problem)), None)
    if problem is not None:
        return _after_problem(state, problem)
    if any(reply.kind is CallReplyKind.FOLLOW for reply in replies):
        return state.model_copy(update={"phase": Phase.FOLLOW, "calls": ()})
    seq = max([state.turn.seq, *(reply.seq for reply in replies)])
    return state.model_copy(
        update={
            "phase": Phase.MODEL,
            "step": state.step + 1,
            "calls": (),
            "turn": state.turn.model_copy(update={"seq": seq}),
        }
    )


def after_follow(state: TurnState, reply: FollowReply, reopening: Opening) -> TurnState:
    """The outcome is there, or the owner is gone: open the turn again and take it over."""
    if reply.result is not None:
        return _done(state, reply.result)
    opening = reopening.model_copy(update={"take_over": reply.take_over})
    ref = state.turn.model_copy(update={"epoch": 0, "seq": 0})
    return state.model_copy(
        update={"phase": Phase.MODEL, "step": 1, "turn": ref, "opening": opening, "calls": ()}
    )


def after_end(state: TurnState, happened: EndReply | Problem) -> TurnState:
    """The turn is over, unless another owner acts for it or it could never have opened."""
    if isinstance(happened, Problem):
        return _after_problem(state, happened)
    if happened.searchable:
        state = state.model_copy(update={"searchable": True})
    if happened.result is not None:
        return _done(state, happened.result)
    follower = state.model_copy(update={"phase": Phase.FOLLOW, "ending": None})
    cancelled = state.ending is not None and state.ending.status is TurnStatus.CANCELLED
    return after_cancel(follower) if cancelled else follower


def is_refused(state: TurnState, problem: Problem) -> bool:
    """Whether the turn was refused before anything was written: there is none to end."""
    return state.opening is not None and problem.code in ERROR_CODES_AT_OPENING


def after_cancel(state: TurnState) -> TurnState:
    """A cancellation ends the turn; a follower only stops following."""
    if state.phase is Phase.FOLLOW:
        return state.model_copy(update={"phase": Phase.REFUSED})
    ending = Ending(status=TurnStatus.CANCELLED, stop_reason=StopReason.CANCELLED)
    return state.model_copy(update={"phase": Phase.END, "ending": ending, "calls": ()})


def after_call(state: CallState, happened: CallReply | Problem) -> CallState:
    """What follows one activity of a call."""
    if isinstance(happened, CallReply):
        if happened.kind is not CallReplyKind.RECONCILE:
            return state.model_copy(update={"phase": CallPhase.DONE, "reply": happened})
        return _after_look(state)
    if happened.code in LEDGER_FAILURE_CODES or state.phase is CallPhase.SETTLE:
        # No activity can mend this: the call's turn ends, and that closes the call.
        return state.model_copy(update={"phase": CallPhase.DONE, "reply": happened})
    return _after_lost(state)


def _after_look(state: CallState) -> CallState:
    if state.phase is CallPhase.RUN:
        update = {"phase": CallPhase.RECONCILE, "looked": True, "delay_s": 0.0}
        return state.model_copy(update=update)
    # The reconcile function allowed another generation: run it, ever more patiently.
    rounds = state.rounds + 1
    phase = CallPhase.SETTLE if rounds >= TEMPORAL_ATTEMPTS_MAX else CallPhase.RUN
    delay_s = 0.0 if rounds == 1 else backoff_s(rounds - 1)
    return state.model_copy(update={"phase": phase, "rounds": rounds, "delay_s": delay_s})


def _after_lost(state: CallState) -> CallState:
    if state.lost >= len(RESCHEDULE_DELAYS_S):
        return state.model_copy(update={"phase": CallPhase.SETTLE, "delay_s": 0.0})
    # The tool's activity is the gate: whatever became of the last one, running it again is safe.
    return state.model_copy(
        update={
            "phase": CallPhase.RUN,
            "lost": state.lost + 1,
            "delay_s": RESCHEDULE_DELAYS_S[state.lost],
        }
    )


def _after_problem(state: TurnState, problem: Problem) -> TurnState:
    ending = Ending(status=TurnStatus.FAILED, stop_reason=problem.code, detail=problem.detail)
    phase = Phase.REFUSED if is_refused(state, problem) else Phase.END
    return state.model_copy(update={"phase": phase, "ending": ending})


def _done(state: TurnState, result: TurnResult | None) -> TurnState:
    if result is not None:
        # Replies leave out what is known here.
        known = {"turn_id": state.turn.turn_id, "request_digest": state.request_digest}
        result = result.model_copy(update=known)
    return state.model_copy(update={"phase": Phase.DONE, "result": result, "calls": ()})
