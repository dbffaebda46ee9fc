"""What a call comes to: the first outcome wins, and a call without one is closed once.

What comes too late is kept beside the ledger and never changes what the model was told.
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

from perdure.contracts.errors import LedgerBehind, LedgerRejection
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.stores import Store
from perdure.stores.commands import DispatchKind
from perdure.stores.operations import (
    close_call,
    reported_errors,
    settle_call,
    stop_attempt,
)
from perdure.stores.partials import append_tool_output
from perdure.stores.queries import Reader


def _one_call(store: Store, safety: ReplaySafety) -> TurnDriver:
    return TurnDriver(store).calling(("work", safety))


def _result(turn: TurnDriver) -> tuple[str, str]:
    [settled] = [event for event in turn.events() if event.kind == "tool_settled"]
    return settled.status.value, settled.text


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
