"""The gate in front of every effect: T1 allows one execution, T2 records its outcome.

Who may run again is decided by the replay safety, the generation and what became of its holder.
"""

import pytest
from harness.ledger_driver import (
    KEYED,
    LOST_AT_ONCE_MS,
    RECONCILED,
    SAFE,
    UNSAFE,
    TurnDriver,
    done,
    owner,
    rows,
    unchanged,
)
from sqlalchemy import Connection, text

from perdure.contracts.errors import LedgerBehind, LedgerRejection
from perdure.contracts.events import Decision, Observation
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.stores import Store
from perdure.stores.commands import DispatchKind
from perdure.stores.operations import (
    close_call,
    dispatch_call,
    renew_attempts,
    report_reconcile,
    reported_errors,
    settle_call,
    stop_attempt,
)
from perdure.stores.partials import append_tool_output
from perdure.stores.queries import Reader

ALL = tuple(ReplaySafety)
RERUN_BY_THEMSELVES = (SAFE, KEYED)


def _one_call(store: Store, safety: ReplaySafety) -> TurnDriver:
    return TurnDriver(store).calling(("work", safety))


def _result(turn: TurnDriver) -> tuple[str, str]:
    [settled] = [event for event in turn.events() if event.kind == "tool_settled"]
    return settled.status.value, settled.text


@pytest.mark.parametrize("safety", ALL)
def test_the_first_dispatch_is_committed_before_the_effect_and_carries_the_arguments(
    store: Store, safety: ReplaySafety
) -> None:
    turn = _one_call(store, safety)

    reply = turn.dispatch("token", safety)

    assert (reply.kind, reply.generation, reply.safety) == (DispatchKind.MINE, 1, safety)
    assert reply.called is not None
    assert reply.called.arguments == {"number": 0}
    assert turn.kinds()[-1] == "tool_dispatched"
    assert rows(store, "select state, generation, safety from operations") == [
        ("prepared", 1, safety.value)
    ]
    assert rows(store, "select state from journal") == [("prepared",)]


@pytest.mark.parametrize("safety", ALL)
def test_a_lost_acknowledgement_of_a_dispatch_is_answered_by_the_same_token(
    store: Store, safety: ReplaySafety
) -> None:
    turn = _one_call(store, safety)
    command = turn.dispatch_command("token", safety)
    first = store.transact(dispatch_call, command)

    with unchanged(store):
        assert store.transact(dispatch_call, command) == first


@pytest.mark.parametrize("safety", ALL)
def test_an_exact_retry_of_an_outcome_changes_nothing(store: Store, safety: ReplaySafety) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)
    command = turn.settle_command("token")
    first = store.transact(settle_call, command)

    with unchanged(store):
        assert store.transact(settle_call, command) == first

    assert _result(turn) == ("ok", "done")
    assert rows(store, "select state, status from operations") == [("outcome_committed", "ok")]
    assert rows(store, "select state from journal order by state") == [
        ("outcome_committed",),
        ("prepared",),
    ]
    assert rows(store, "select count(*) from late_results") == [(0,)]


@pytest.mark.parametrize("safety", ALL)
def test_a_call_with_a_result_is_never_dispatched_again(store: Store, safety: ReplaySafety) -> None:
    turn = _one_call(store, safety)
    turn.run_call(safety)

    with unchanged(store):
        again = turn.dispatch("another", safety, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    assert again.kind is DispatchKind.SETTLED


@pytest.mark.parametrize("safety", ALL)
def test_a_living_holder_keeps_its_call(store: Store, safety: ReplaySafety) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)

    with unchanged(store):
        held = turn.dispatch("another", safety, rerun_of=1)

    assert (held.kind, held.generation) == (DispatchKind.HELD, 1)
    assert (held.holder_is_lost, held.rerun_allowed) == (False, False)


@pytest.mark.parametrize("safety", ALL)
def test_a_lost_holder_is_followed_only_where_the_safety_allows_it(
    store: Store, safety: ReplaySafety
) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)

    reply = turn.dispatch("another", safety, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    if safety in RERUN_BY_THEMSELVES:
        assert (reply.kind, reply.generation) == (DispatchKind.MINE, 2)
        assert reply.called is not None
        assert reply.called.arguments == {"number": 0}
        assert reply.operation_id == turn.operation_id()
    else:
        assert (reply.kind, reply.generation) == (DispatchKind.HELD, 1)
        assert (reply.holder_is_lost, reply.rerun_allowed) == (True, False)
    assert turn.kinds().count("tool_dispatched") == 1


@pytest.mark.parametrize("safety", RERUN_BY_THEMSELVES)
def test_an_exact_retry_of_a_rerun_changes_nothing(store: Store, safety: ReplaySafety) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)
    command = turn.dispatch_command("second", safety, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)
    first = store.transact(dispatch_call, command)

    with unchanged(store):
        assert store.transact(dispatch_call, command) == first


@pytest.mark.parametrize("safety", RERUN_BY_THEMSELVES)
def test_only_one_of_two_newcomers_gets_the_next_generation(
    store: Store, safety: ReplaySafety
) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)
    turn.dispatch("second", safety, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    with unchanged(store):
        third = turn.dispatch("third", safety, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    assert (third.kind, third.generation) == (DispatchKind.HELD, 2)


def test_looking_at_a_lost_holder_takes_nothing(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("token", SAFE)

    with unchanged(store):
        seen = turn.dispatch("another", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, only_looking=True)

    assert (seen.kind, seen.rerun_allowed) == (DispatchKind.HELD, True)


@pytest.mark.parametrize("safety", ALL)
def test_an_earlier_attempt_of_the_same_activity_is_followed_at_once(
    store: Store, safety: ReplaySafety
) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)

    with unchanged(store):
        seen = turn.dispatch("next", safety, activity_attempt=2, only_looking=True)

    assert seen.holder_is_earlier_attempt
    assert seen.rerun_allowed is (safety in RERUN_BY_THEMSELVES)


def test_the_same_attempt_number_of_another_activity_is_no_earlier_attempt(store: Store) -> None:
    """A reset schedules the activity anew: the holder of the former run may be alive."""
    turn = _one_call(store, SAFE)
    turn.dispatch("token", SAFE)

    seen = turn.dispatch("next", SAFE, activity="another-run/0", activity_attempt=2)

    assert (seen.holder_is_earlier_attempt, seen.rerun_allowed) == (False, False)


@pytest.mark.parametrize("safety", ALL)
def test_a_stopped_holder_counts_as_lost(store: Store, safety: ReplaySafety) -> None:
    turn = _one_call(store, safety)
    turn.dispatch("token", safety)
    store.transact(stop_attempt, "token")

    with unchanged(store):
        store.transact(stop_attempt, "token")
        store.transact(renew_attempts, ["token"])
        seen = turn.dispatch("next", safety, only_looking=True)

    assert seen.holder_is_lost
    assert seen.rerun_allowed is (safety in RERUN_BY_THEMSELVES)


def test_a_sign_of_life_keeps_the_holder(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("token", SAFE)
    store.transact(lambda tx: _backdate(tx, 10_000))
    assert turn.dispatch("next", SAFE, holder_lost_ms=5_000).holder_is_lost

    store.transact(renew_attempts, ["token"])

    assert not turn.dispatch("next", SAFE, holder_lost_ms=5_000).holder_is_lost


def _backdate(tx: Connection, by_ms: int) -> None:
    tx.execute(text("update operation_attempts set alive_at_ms = alive_at_ms - :by"), {"by": by_ms})


@pytest.mark.parametrize("worker", [SAFE, KEYED, RECONCILED])
def test_a_stored_unsafe_is_never_made_weaker_by_a_worker(
    store: Store, worker: ReplaySafety
) -> None:
    turn = _one_call(store, UNSAFE)

    first = turn.dispatch("token", worker)
    second = turn.dispatch("next", worker, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    assert first.safety is UNSAFE
    assert (second.kind, second.rerun_allowed) == (DispatchKind.HELD, False)


def test_a_worker_that_declares_the_tool_unsafe_vetoes_the_rerun_of_a_safe_one(
    store: Store,
) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("token", SAFE)

    with unchanged(store):
        held = turn.dispatch("next", UNSAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    assert (held.kind, held.safety) == (DispatchKind.HELD, UNSAFE)
    assert (held.holder_is_lost, held.rerun_allowed) == (True, False)


def test_a_dispatch_under_a_stricter_declaration_stays_strict(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("token", UNSAFE)

    held = turn.dispatch("next", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    assert (held.kind, held.safety) == (DispatchKind.HELD, UNSAFE)


@pytest.mark.parametrize("observation", list(Observation))
def test_what_a_reconcile_function_says_decides_in_the_same_transaction(
    store: Store, observation: Observation
) -> None:
    turn = _one_call(store, RECONCILED)
    turn.dispatch("token", RECONCILED)
    outcome = done("found it") if observation is Observation.EXECUTED else None

    reply = turn.reconcile(observation, outcome=outcome)

    reported, decided = [event for event in turn.events() if "co" in event.kind[:6]][-2:]
    assert reported.kind == "reconcile_reported"
    assert decided.kind == "recovery_decided"
    match observation:
        case Observation.EXECUTED:
            assert (reply.kind, decided.decision) == (DispatchKind.SETTLED, Decision.COMPLETED)
            assert _result(turn) == ("ok", "found it")
        case Observation.NOT_EXECUTED:
            assert (reply.kind, decided.decision) == (DispatchKind.HELD, Decision.RERUN)
            assert "tool_settled" not in turn.kinds()
        case Observation.UNKNOWN:
            assert (reply.kind, decided.decision) == (DispatchKind.SETTLED, Decision.PARKED)
            assert _result(turn)[0] == "interrupted"


@pytest.mark.parametrize("observation", list(Observation))
def test_an_exact_retry_of_a_report_changes_nothing(store: Store, observation: Observation) -> None:
    turn = _one_call(store, RECONCILED)
    turn.dispatch("token", RECONCILED)
    outcome = done("found it") if observation is Observation.EXECUTED else None
    command = turn.reconcile_command(observation, outcome=outcome)
    first = store.transact(report_reconcile, command)

    with unchanged(store):
        again = store.transact(report_reconcile, command)

    assert again.kind is first.kind


def test_another_report_on_a_decided_generation_changes_nothing(store: Store) -> None:
    turn = _one_call(store, RECONCILED)
    turn.dispatch("token", RECONCILED)
    turn.reconcile(Observation.NOT_EXECUTED)

    with unchanged(store):
        reply = turn.reconcile(Observation.UNKNOWN)

    assert reply.kind is DispatchKind.HELD


def test_not_executed_allows_exactly_one_further_generation(store: Store) -> None:
    turn = _one_call(store, RECONCILED)
    turn.dispatch("first", RECONCILED)
    turn.reconcile(Observation.NOT_EXECUTED)

    second = turn.dispatch("second", RECONCILED, rerun_of=1)
    third = turn.dispatch("third", RECONCILED, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=2)

    assert (second.kind, second.generation) == (DispatchKind.MINE, 2)
    assert (third.kind, third.rerun_allowed) == (DispatchKind.HELD, False)
    assert turn.reconcile(Observation.NOT_EXECUTED, generation=1).generation == 2
    turn.reconcile(Observation.NOT_EXECUTED, generation=2)
    assert turn.dispatch("third", RECONCILED, rerun_of=2).generation == 3


def test_a_report_on_an_unsafe_call_allows_no_rerun(store: Store) -> None:
    turn = _one_call(store, RECONCILED)
    turn.dispatch("first", UNSAFE)
    turn.reconcile(Observation.NOT_EXECUTED)

    reply = turn.dispatch("second", RECONCILED, rerun_of=1, holder_lost_ms=LOST_AT_ONCE_MS)

    assert (reply.kind, reply.rerun_allowed) == (DispatchKind.HELD, False)


def test_the_first_outcome_wins_and_a_later_one_is_kept_beside_the_ledger(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("first", SAFE)
    turn.dispatch("second", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)
    turn.settle("second", done("from the second"), generation=2)

    late = turn.settle_command("first", done("from the first"))
    answered = store.transact(settle_call, late)
    with unchanged(store):
        assert store.transact(settle_call, late) == answered

    assert _result(turn) == ("ok", "from the second")
    details = Reader(store).details(turn.turn_id)
    assert details is not None
    [kept] = details.late_results
    assert (kept.generation, kept.text, kept.reason) == (1, "from the first", "already_settled")
    [operation] = details.operations
    assert [run.outcome for run in operation.generations] == ["late", "won"]


def test_the_real_result_of_a_holder_that_was_thought_lost_wins_if_it_is_first(
    store: Store,
) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("first", SAFE)
    turn.dispatch("second", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    turn.settle("first", done("from the first"))
    turn.settle("second", done("from the second"), generation=2)

    assert _result(turn) == ("ok", "from the first")
    assert rows(store, "select text from late_results") == [("from the second",)]


def test_an_outcome_of_an_older_epoch_is_a_fact(store: Store) -> None:
    old = _one_call(store, UNSAFE)
    old.dispatch("token", UNSAFE)
    new = TurnDriver(store, acting=owner("second"))
    new.prepare(opening=new.opening(take_over=1))

    old.settle("token", done("it happened"))

    assert _result(new) == ("ok", "it happened")


def test_an_outcome_without_a_dispatch_is_a_late_result(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    command = turn.settle_command("unheard-of", done("it happened"))

    store.transact(settle_call, command)
    with unchanged(store):
        store.transact(settle_call, command)

    assert "tool_settled" not in turn.kinds()
    assert rows(store, "select text, reason from late_results") == [("it happened", "no_dispatch")]


def test_an_outcome_of_a_turn_that_the_ledger_lost_is_kept(store: Store) -> None:
    """A restored backup does not know the turn: what happened must not be forgotten again."""
    turn = TurnDriver(store)
    turn.epoch, turn.seq = 1, 9
    command = turn.settle_command("unheard-of", done("it happened"))

    store.transact(settle_call, command)
    with unchanged(store):
        store.transact(settle_call, command)

    assert rows(store, "select turn_id, text, reason from late_results") == [
        (turn.turn_id, "it happened", "no_dispatch")
    ]


def test_a_late_result_never_changes_what_the_model_was_told(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    turn.dispatch("token", UNSAFE)
    turn.close(ResultReason.WORKER_LOST, generation=1, holder_lost_ms=LOST_AT_ONCE_MS)
    told = _result(turn)
    turn.prepare(2)

    turn.settle("token", done("it did happen"))

    assert _result(turn) == told
    assert rows(store, "select text from late_results") == [("it did happen",)]


def test_an_interrupted_call_tells_the_model_what_was_done_so_far(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    turn.dispatch("token", UNSAFE)
    store.transact(
        append_tool_output, turn.turn_id, turn.operation_id(), 1, 1, "committed progress"
    )

    turn.close(ResultReason.WORKER_LOST, generation=1, holder_lost_ms=LOST_AT_ONCE_MS)

    status, said = _result(turn)
    assert status == "interrupted"
    assert "interrupted" in said
    assert "may or may not have taken effect" in said
    assert said.endswith("committed progress")


def test_a_call_is_interrupted_once(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    turn.dispatch("token", UNSAFE)
    command = turn.close_command(
        ResultReason.WORKER_LOST, generation=1, holder_lost_ms=LOST_AT_ONCE_MS
    )
    first = store.transact(close_call, command)

    with unchanged(store):
        assert store.transact(close_call, command) == first


def test_a_living_holder_is_not_interrupted(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    turn.dispatch("token", UNSAFE)

    with unchanged(store):
        reply = turn.close(ResultReason.WORKER_LOST, generation=1)

    assert (reply.kind, reply.holder_is_lost) == (DispatchKind.HELD, False)


def test_a_newer_generation_is_not_interrupted_in_the_name_of_an_older_one(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("first", SAFE)
    turn.dispatch("second", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    with unchanged(store):
        reply = turn.close(ResultReason.WORKER_LOST, generation=1, holder_lost_ms=LOST_AT_ONCE_MS)

    assert (reply.kind, reply.generation) == (DispatchKind.HELD, 2)


def test_not_executed_is_said_only_where_nothing_was_dispatched(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    command = turn.close_command(ResultReason.TOOL_UNAVAILABLE)
    reply = store.transact(close_call, command)

    with unchanged(store):
        assert store.transact(close_call, command) == reply
        # From then on it can never run.
        assert turn.dispatch("token", UNSAFE).kind is DispatchKind.SETTLED

    assert reply.kind is DispatchKind.SETTLED
    status, said = _result(turn)
    assert status == "not_executed"
    assert "never started" in said


def test_a_dispatched_call_is_never_called_not_executed(store: Store) -> None:
    turn = _one_call(store, UNSAFE)
    turn.dispatch("token", UNSAFE)

    with unchanged(store):
        reply = turn.close(ResultReason.TOOL_UNAVAILABLE, holder_lost_ms=LOST_AT_ONCE_MS)

    assert reply.kind is DispatchKind.HELD
    assert reply.holder_is_lost


def test_reported_errors_are_counted_and_lost_workers_are_not(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("first", SAFE)
    store.transact(stop_attempt, "first", "error")
    with unchanged(store):
        store.transact(stop_attempt, "first", "error")
    turn.dispatch("second", SAFE, rerun_of=1)
    store.transact(stop_attempt, "second")
    reply = turn.dispatch("third", SAFE, rerun_of=2)

    assert (reply.generation, reply.errors) == (3, 1)
    assert store.read(reported_errors, turn.operation_id()) == 1


def test_calls_of_one_step_are_settled_in_any_order(store: Store) -> None:
    turn = TurnDriver(store).calling(("a", SAFE), ("b", KEYED), ("c", UNSAFE))
    for index in (0, 1, 2):
        turn.dispatch(f"token-{index}", (SAFE, KEYED, UNSAFE)[index], index=index)
    for index in (2, 0, 1):
        turn.settle(f"token-{index}", done(f"result {index}"), index=index)

    turn.prepare(2)

    details = Reader(store).details(turn.turn_id)
    assert details is not None
    assert [(view.index, view.text) for view in details.operations] == [
        (0, "result 0"),
        (1, "result 1"),
        (2, "result 2"),
    ]


def test_calls_with_the_same_provider_id_are_told_apart(store: Store) -> None:
    turn = TurnDriver(store).calling(("a", SAFE), ("a", SAFE))

    first = turn.dispatch("one", SAFE, index=0)
    second = turn.dispatch("two", SAFE, index=1)

    assert first.operation_id != second.operation_id
    assert first.called is not None
    assert second.called is not None
    assert first.called.provider_call_id == second.called.provider_call_id


def test_a_call_that_no_answer_asked_for_is_refused(store: Store) -> None:
    turn = _one_call(store, SAFE)

    with unchanged(store), pytest.raises(LedgerRejection) as caught:
        turn.dispatch("token", SAFE, index=7)

    assert caught.value.reason == "orphan_dispatch"


def test_reconciling_where_every_attempt_is_missing_is_a_ledger_that_is_behind(
    store: Store,
) -> None:
    turn = _one_call(store, RECONCILED)

    with unchanged(store), pytest.raises(LedgerBehind):
        turn.dispatch("token", RECONCILED, only_looking=True)


def test_an_ended_turn_dispatches_nothing_and_keeps_what_still_comes(store: Store) -> None:
    turn = TurnDriver(store).calling(("a", UNSAFE), ("b", SAFE))
    turn.dispatch("token", UNSAFE)
    ended = turn.end()

    with unchanged(store):
        refused = turn.dispatch("other", SAFE, index=1)
        rerun = turn.dispatch("again", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)
    turn.settle("token", done("it happened"))

    assert (refused.kind, refused.result) == (DispatchKind.OVER, ended)
    assert rerun.kind is DispatchKind.OVER
    assert rows(store, "select text, reason from late_results") == [
        ("it happened", "already_settled")
    ]
    assert turn.kinds()[-1] == "turn_ended"


def test_an_outcome_keeps_its_whole_text_beside_the_part_for_the_model(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("token", SAFE)
    turn.settle("token", done("the head", full="the head and all the rest", flags=("cut",)))

    details = Reader(store).details(turn.turn_id)

    assert details is not None
    [operation] = details.operations
    assert (operation.text, operation.flags) == ("the head", ("cut",))
    assert operation.full_digest is not None
    assert Reader(store).blob(operation.full_digest) == "the head and all the rest"


def test_an_outcome_that_is_an_error_is_a_result_like_any_other(store: Store) -> None:
    turn = _one_call(store, SAFE)
    turn.dispatch("token", SAFE)
    turn.settle("token", done("it broke").model_copy(update={"status": ResultStatus.ERROR}))

    assert _result(turn) == ("error", "it broke")
    assert turn.prepare(2).kind == "ready"
