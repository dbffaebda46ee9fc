"""What a turn decides, without a server: pure transitions of `workflows/_decide.py`."""

import json
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
from perdure.contracts.turn import TurnLimits, TurnResult, TurnStatus, parse_turn_request
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


def test_a_new_turn_carries_its_whole_opening_and_begins_with_the_model() -> None:
    state = decide.begin(
        REQUEST.model_copy(update={"tools": ("t",), "limits": TurnLimits(model_steps_max=3)}), "run"
    )

    assert (state.phase, state.step, state.agent) == (Phase.MODEL, 1, "a")
    assert state.turn.turn_id == REQUEST.key.turn_id
    assert (state.turn.epoch, state.turn.store, state.turn.seq) == (0, "", 0)
    assert state.opening is not None
    assert (state.opening.message, state.opening.run_id) == (REQUEST.message, "run")
    assert (state.opening.tools, state.opening.limits.model_steps_max) == (("t",), 3)


def test_an_answer_whose_calls_are_all_refused_leads_to_the_next_step() -> None:
    state = decide.after_model(new(), StepReply(kind=StepKind.CALLS, epoch=1, seq=7))

    assert (state.phase, state.calls) == (Phase.TOOLS, ())
    following = decide.after_tools(state, [])
    assert (following.phase, following.step, following.turn.seq) == (Phase.MODEL, 2, 7)


def test_what_the_turn_has_seen_never_goes_back() -> None:
    state = decide.after_model(opened(), StepReply(kind=StepKind.CALLS, epoch=1, seq=2))

    assert state.turn.seq == 4


def test_an_outcome_met_by_one_call_ends_the_turn_whatever_the_others_say() -> None:
    happened = [
        Problem(code="ledger_behind"),
        CallReply(kind=CallReplyKind.FOLLOW),
        CallReply(kind=CallReplyKind.OVER, result=DONE),
    ]

    state = decide.after_tools(opened(), list(happened))

    assert (state.phase, state.calls) == (Phase.DONE, ())
    assert state.result is not None
    assert state.result.status is TurnStatus.COMPLETED


def test_a_call_fenced_by_a_newer_owner_makes_the_turn_a_follower() -> None:
    happened = [
        CallReply(kind=CallReplyKind.SETTLED, seq=6),
        CallReply(kind=CallReplyKind.FOLLOW),
    ]

    state = decide.after_tools(opened(), list(happened))

    assert (state.phase, state.step, state.calls) == (Phase.FOLLOW, 1, ())


def test_a_followed_turn_that_ends_gives_its_outcome() -> None:
    following = decide.after_model(new(), StepReply(kind=StepKind.FOLLOW))
    assert following.opening is not None

    state = decide.after_follow(following, FollowReply(result=DONE), following.opening)

    assert state.phase is Phase.DONE
    assert state.result is not None
    assert state.result.turn_id == REQUEST.key.turn_id


def test_who_takes_over_forgets_what_it_knew_as_the_owner_before() -> None:
    fenced = opened(phase=Phase.FOLLOW, step=5)
    opening = new().opening
    assert opening is not None

    state = decide.after_follow(fenced, FollowReply(take_over=2), opening)

    assert (state.step, state.turn.epoch, state.turn.seq) == (1, 0, 0)
    # Another ledger is still refused.
    assert state.turn.store == "s"


def test_the_end_of_a_turn_gives_its_outcome() -> None:
    failed = DONE.model_copy(update={"status": TurnStatus.FAILED, "stop_reason": "model_failed"})

    state = decide.after_end(opened(phase=Phase.END), EndReply(result=failed))

    assert state.phase is Phase.DONE
    assert state.result is not None
    assert state.result.stop_reason == "model_failed"


def test_a_cancellation_that_another_owner_forbids_only_stops_the_following() -> None:
    cancelled = decide.after_cancel(opened())

    assert decide.after_end(cancelled, EndReply()).phase is Phase.REFUSED


def test_a_cancellation_drops_the_calls_and_says_so() -> None:
    state = decide.after_cancel(opened())

    assert (state.phase, state.calls) == (Phase.END, ())
    assert state.ending is not None
    assert (state.ending.status, state.ending.stop_reason) == ("cancelled", "cancelled")


def test_the_reason_of_a_failure_is_told_with_its_detail() -> None:
    state = decide.after_model(new(), Problem(code="model_failed", detail="after 4 tries"))

    assert state.phase is Phase.END
    assert state.ending is not None
    assert (state.ending.status, state.ending.detail) == (TurnStatus.FAILED, "after 4 tries")


@pytest.mark.parametrize("kind", [CallReplyKind.SETTLED, CallReplyKind.OVER, CallReplyKind.FOLLOW])
@pytest.mark.parametrize("phase", [CallPhase.RUN, CallPhase.RECONCILE, CallPhase.SETTLE])
def test_a_reply_of_the_gate_is_the_end_of_a_call(kind: CallReplyKind, phase: CallPhase) -> None:
    reply = CallReply(kind=kind, seq=3)

    state = decide.after_call(CallState(call=CALL, phase=phase), reply)

    assert (state.phase, state.reply) == (CallPhase.DONE, reply)


def test_a_reconcile_that_is_lost_goes_back_through_the_gate() -> None:
    asking = decide.after_call(CallState(call=CALL), CallReply(kind=CallReplyKind.RECONCILE))

    state = decide.after_call(asking, Problem(code="activity_lost"))

    assert (state.phase, state.lost, state.delay_s) == (CallPhase.RUN, 1, RESCHEDULE_DELAYS_S[0])


def test_a_state_goes_through_json_and_loses_nothing() -> None:
    for state in (new(), opened(), decide.after_cancel(opened())):
        encoded = state.model_dump(mode="json", exclude_defaults=True)
        assert TurnState.model_validate(json.loads(json.dumps(encoded))) == state
