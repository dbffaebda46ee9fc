"""The gate in front of every effect: T1 allows one execution, and a reconcile report decides.

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
    damage,
    done,
    rows,
    unchanged,
)
from sqlalchemy import Connection, text

from perdure.contracts.events import Decision, Observation
from perdure.contracts.safety import ReplaySafety
from perdure.stores import Store
from perdure.stores.commands import DispatchKind
from perdure.stores.operations import (
    dispatch_call,
    renew_attempts,
    report_reconcile,
    settle_call,
    stop_attempt,
)

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


@pytest.mark.parametrize("safety", ALL)
def test_nothing_is_dispatched_behind_a_terminal_event_whatever_the_projection_says(
    store: Store, safety: ReplaySafety
) -> None:
    turn = _one_call(store, safety)
    # A damaged turn gets its terminal event all the same, and its calls stay open.
    damage(store, "update events set payload = '{}' where kind = 'model_prepared'")
    turn.end()
    damage(store, "update turns set status = 'open'")

    with unchanged(store):
        reply = turn.dispatch("token", safety)

    assert reply.kind is DispatchKind.OVER
    assert reply.result is not None
    assert (reply.result.status.value, reply.result.stop_reason) == ("cancelled", "cancelled")
