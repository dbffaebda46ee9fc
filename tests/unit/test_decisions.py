"""What a turn decides, without a server: pure transitions of `workflows/_decide.py`."""

from typing import Any

import pytest

from perdure.contracts.calls import (
    CallRef,
    CallReply,
    CallReplyKind,
    EndReply,
    FollowReply,
    StepKind,
    StepReply,
)
from perdure.contracts.errors import ERROR_CODES_AT_OPENING, LEDGER_FAILURE_CODES
from perdure.contracts.safety import RESCHEDULE_DELAYS_S, TEMPORAL_ATTEMPTS_MAX, ReplaySafety
from perdure.contracts.turn import TurnResult, TurnStatus, parse_turn_request
from perdure.workflows import _decide as decide
from perdure.workflows._decide import CallPhase, CallState, Phase, Problem, TurnState

REQUEST = parse_turn_request(
    {"agent": "a", "conversation_id": "c", "request_id": "r", "message": "hi"}
)
DONE = TurnResult(status=TurnStatus.COMPLETED, stop_reason="answered")
CALL = CallRef(index=0, tool="t", safety=ReplaySafety.UNSAFE)


def new() -> TurnState:
    """A turn that has not opened."""
    return decide.begin(REQUEST, "run")


def opened(**changes: Any) -> TurnState:
    """A turn in its tools."""
    reply = StepReply(kind=StepKind.CALLS, agent="a", epoch=1, store="s", seq=4, calls=(CALL,))
    return decide.after_model(new(), reply).model_copy(update=changes)


def test_an_answer_with_calls_opens_the_turn_and_drops_its_message() -> None:
    state = opened()

    assert (state.phase, state.calls, state.opening) == (Phase.TOOLS, (CALL,), None)
    assert (state.turn.epoch, state.turn.store, state.turn.seq) == (1, "s", 4)


def test_settled_calls_lead_to_the_next_step_and_the_newest_seq_is_known() -> None:
    replies = [CallReply(kind=CallReplyKind.SETTLED, seq=seq) for seq in (6, 9, 8)]

    state = decide.after_tools(opened(), list(replies))

    assert (state.phase, state.step, state.turn.seq) == (Phase.MODEL, 2, 9)


def test_an_outcome_ends_the_turn_and_gets_the_identities_it_came_without() -> None:
    state = decide.after_model(new(), StepReply(kind=StepKind.OVER, result=DONE))

    assert state.phase is Phase.DONE
    assert state.result is not None
    assert state.result.turn_id == REQUEST.key.turn_id
    assert state.result.request_digest == REQUEST.digest


@pytest.mark.parametrize("code", sorted(ERROR_CODES_AT_OPENING))
def test_a_refusal_at_opening_ends_nothing(code: str) -> None:
    assert decide.after_model(new(), Problem(code=code)).phase is Phase.REFUSED


def test_the_same_problem_of_an_open_turn_ends_it() -> None:
    state = decide.after_model(opened(phase=Phase.MODEL), Problem(code="unknown_agent"))

    assert state.phase is Phase.END
    assert state.ending is not None
    assert (state.ending.status, state.ending.stop_reason) == ("failed", "unknown_agent")


def test_another_owner_is_followed_and_taken_over_when_it_is_gone() -> None:
    following = decide.after_model(new(), StepReply(kind=StepKind.FOLLOW))
    opening = following.opening
    assert opening is not None

    taking = decide.after_follow(following, FollowReply(take_over=3), opening)

    assert following.phase is Phase.FOLLOW
    assert (taking.phase, taking.step) == (Phase.MODEL, 1)
    assert taking.opening is not None
    assert taking.opening.take_over == 3


def test_a_cancellation_ends_an_own_turn_and_only_stops_a_follower() -> None:
    following = decide.after_model(new(), StepReply(kind=StepKind.FOLLOW))

    assert decide.after_cancel(opened()).phase is Phase.END
    assert decide.after_cancel(following).phase is Phase.REFUSED


def test_an_end_that_another_owner_forbids_becomes_a_follower() -> None:
    assert decide.after_end(opened(phase=Phase.END), EndReply()).phase is Phase.FOLLOW


def test_a_lost_call_is_run_again_three_times_and_then_settled() -> None:
    state = CallState(call=CALL)
    delays: list[float] = []
    for _ in RESCHEDULE_DELAYS_S:
        state = decide.after_call(state, Problem(code="activity_lost"))
        assert state.phase is CallPhase.RUN
        delays.append(state.delay_s)

    assert tuple(delays) == RESCHEDULE_DELAYS_S
    assert decide.after_call(state, Problem(code="activity_lost")).phase is CallPhase.SETTLE


@pytest.mark.parametrize("code", sorted(LEDGER_FAILURE_CODES))
def test_a_failure_of_the_ledger_ends_the_turn_instead_of_trying_for_ever(code: str) -> None:
    call = decide.after_call(CallState(call=CALL), Problem(code=code))
    assert call.phase is CallPhase.DONE
    assert isinstance(call.reply, Problem)

    assert decide.after_tools(opened(), [call.reply]).phase is Phase.END


def test_a_settle_that_fails_is_not_repeated() -> None:
    state = CallState(call=CALL, phase=CallPhase.SETTLE)

    assert decide.after_call(state, Problem(code="anything")).phase is CallPhase.DONE


def test_reconciling_and_running_take_turns_ever_more_patiently_and_end() -> None:
    look = CallReply(kind=CallReplyKind.RECONCILE)
    state, delays = CallState(call=CALL), list[float]()
    while state.phase is not CallPhase.SETTLE:
        state = decide.after_call(state, look)
        assert state.phase is CallPhase.RECONCILE
        state = decide.after_call(state, look)
        delays.append(state.delay_s)

    assert len(delays) == TEMPORAL_ATTEMPTS_MAX
    assert delays == sorted(delays)
    assert delays[0] == 0.0
