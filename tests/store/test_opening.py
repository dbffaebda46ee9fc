"""Opening a turn: one transaction that creates, claims, pins, or says who is in the way."""

import pytest
from harness.ledger_driver import (
    SAFE,
    UNSAFE,
    TurnDriver,
    contents,
    owner,
    rows,
    unchanged,
)

from perdure.contracts.calls import TurnRef
from perdure.contracts.errors import (
    LedgerBehind,
    LedgerRejection,
    NamespaceMismatch,
    RequestConflict,
    StepLimit,
    SummaryRequired,
    WrongStore,
)
from perdure.contracts.messages import user_message
from perdure.contracts.turn import TurnLimits, TurnStatus
from perdure.stores import Store
from perdure.stores.checkpoints import TURN_KIND, load_checkpoint
from perdure.stores.commands import Eviction, FailAttempt, PrepareKind
from perdure.stores.ledger import (
    check_store,
    commit_answer,
    end_turn,
    fail_model_attempt,
    latest_owner,
    load_context,
)
from perdure.stores.transcript import (
    ConversationAppend,
    append_messages,
    ensure_conversation,
    read_conversation,
)
from perdure.stores.turns import prepare_step


def test_opening_writes_message_request_owner_checkpoint_and_claim_at_once(store: Store) -> None:
    turn = TurnDriver(store)

    state = turn.prepare()

    assert (state.kind, state.epoch, state.seq, state.attempt) == (PrepareKind.READY, 1, 2, 1)
    assert turn.kinds() == ["user_message", "model_prepared"]
    assert store.read(read_conversation, "default", "talk").active_turn_id == turn.turn_id
    assert store.read(latest_owner, turn.ref) == (1, turn.owner)
    checkpoint = store.read(load_checkpoint, turn.turn_id)
    assert (checkpoint.kind, checkpoint.revision) == (TURN_KIND, 0)
    assert rows(store, "select disposition, turn_id from receipts") == [("turn", turn.turn_id)]
    assert turn.transcript() == []


def test_the_opening_pins_what_the_turn_may_use(store: Store) -> None:
    turn = TurnDriver(store, limits=TurnLimits(model_steps_max=7))

    state = turn.prepare(opening=turn.opening(tools=("look",)))

    opened = turn.events()[0]
    assert opened.kind == "user_message"
    assert (opened.tools, opened.limits.model_steps_max) == (("look",), 7)
    assert state.tools == ("look",)


def test_a_prepared_request_can_be_read_back_whole(store: Store) -> None:
    turn = TurnDriver(store, message="what is it?")
    state = turn.prepare(instructions="Be brief.", tools_json='[{"name":"look"}]')
    assert state.prepared is not None

    context = store.read(load_context, turn.turn_id, state.prepared)

    assert context.instructions == "Be brief."
    assert context.tools_json == '[{"name":"look"}]'
    assert [message.text for message in context.messages] == ["what is it?"]


def test_a_repeated_opening_resends_the_same_request_as_a_newer_attempt(store: Store) -> None:
    turn = TurnDriver(store)
    first = store.transact(prepare_step, turn.prepare_command())

    changed = turn.prepare_command(instructions="Other words.", model="other")
    second = store.transact(prepare_step, changed)

    assert second.prepared == first.prepared
    assert (first.attempt, second.attempt) == (1, 2)
    assert turn.kinds() == ["user_message", "model_prepared"]
    assert rows(store, "select attempt, status from usage order by attempt") == [
        (1, "lost"),
        (2, "started"),
    ]


def test_an_exact_retry_of_an_opening_changes_nothing(store: Store) -> None:
    command = TurnDriver(store).prepare_command()
    first = store.transact(prepare_step, command)

    with unchanged(store):
        assert store.transact(prepare_step, command) == first


def test_an_exact_retry_of_a_take_over_changes_nothing(store: Store) -> None:
    TurnDriver(store).prepare()
    second = TurnDriver(store, acting=owner("second"))
    command = second.prepare_command(opening=second.opening(take_over=1))
    first = store.transact(prepare_step, command)

    with unchanged(store):
        assert store.transact(prepare_step, command) == first


def test_an_exact_retry_of_an_eviction_changes_nothing(store: Store) -> None:
    dead = TurnDriver(store)
    dead.prepare()
    heir = TurnDriver(store, "request-2", acting=owner("second"))
    command = heir.prepare_command(eviction=Eviction(turn_id=dead.turn_id, epoch=1))
    first = store.transact(prepare_step, command)

    with unchanged(store):
        assert store.transact(prepare_step, command) == first


def test_the_same_request_with_other_content_is_a_conflict(store: Store) -> None:
    TurnDriver(store, message="one").prepare()
    other = TurnDriver(store, message="another")

    with unchanged(store), pytest.raises(RequestConflict, match="request-1"):
        other.prepare()


def test_other_content_is_a_conflict_also_after_the_turn_has_ended(store: Store) -> None:
    first = TurnDriver(store, message="one")
    first.prepare()
    first.answer()

    with unchanged(store), pytest.raises(RequestConflict):
        TurnDriver(store, message="another").prepare()


def test_the_same_request_after_its_end_gets_the_recorded_outcome(store: Store) -> None:
    first = TurnDriver(store)
    first.prepare()
    answered = first.answer()

    with unchanged(store):
        again = TurnDriver(store, acting=owner("second")).prepare()

    assert again.kind is PrepareKind.OVER
    assert again.result == answered.result
    assert again.result is not None
    assert again.result.answer == "the answer"


def test_a_conversation_of_another_namespace_is_refused(store: Store) -> None:
    store.transact(ensure_conversation, "tenant.one", "talk")

    with unchanged(store), pytest.raises(NamespaceMismatch):
        TurnDriver(store, namespace="tenant.two").prepare()


def test_a_window_that_is_full_still_opens_and_one_more_message_does_not(store: Store) -> None:
    store.transact(ensure_conversation, "default", "talk")
    full = tuple(user_message(str(number)) for number in range(4096))
    append = ConversationAppend(
        namespace="default", conversation_id="talk", expected_version=0, messages=full
    )
    store.transact(append_messages, append)
    turn = TurnDriver(store)
    assert turn.prepare().kind is PrepareKind.READY
    turn.end()

    before = contents(store)
    with pytest.raises(SummaryRequired, match="4098 messages"):
        TurnDriver(store, "request-2").prepare()
    assert contents(store) == before


def test_a_step_beyond_the_limit_is_refused(store: Store) -> None:
    turn = TurnDriver(store, limits=TurnLimits(model_steps_max=1)).calling(("look", SAFE))
    turn.run_call(SAFE)

    with unchanged(store), pytest.raises(StepLimit, match="1 model steps"):
        turn.prepare(2)


def test_the_next_step_waits_for_every_result(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE), ("look", SAFE))
    turn.run_call(SAFE, index=1)

    with unchanged(store), pytest.raises(LedgerRejection, match="calls_open") as caught:
        turn.prepare(2)

    assert caught.value.reason == "calls_open"
    turn.run_call(SAFE, index=0)
    assert turn.prepare(2).kind is PrepareKind.READY


def test_an_open_turn_that_the_ledger_does_not_know_is_a_ledger_that_is_behind(
    store: Store,
) -> None:
    turn = TurnDriver(store)
    turn.epoch, turn.seq = 1, 5

    for act in (turn.prepare, turn.answer, lambda: turn.dispatch("token", SAFE)):
        with unchanged(store), pytest.raises(LedgerBehind):
            act()


def test_a_ledger_without_the_newest_facts_is_behind(store: Store) -> None:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.seq += 1

    with unchanged(store), pytest.raises(LedgerBehind, match="the workflow has seen 5"):
        turn.dispatch("token", UNSAFE)
    with unchanged(store), pytest.raises(LedgerBehind):
        turn.prepare(2)


def test_a_step_that_skips_one_is_a_ledger_that_is_behind(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()

    with unchanged(store), pytest.raises(LedgerBehind):
        turn.prepare(3)


def test_a_turn_of_another_ledger_is_refused(store: Store) -> None:
    ref = TurnRef(conversation_id="talk", request_id="request-1", epoch=1, store="another")

    with pytest.raises(WrongStore, match="PERDURE_STORE_URL"):
        check_store(store.store_id, ref)

    check_store(store.store_id, ref.model_copy(update={"store": store.store_id}))
    check_store(store.store_id, ref.model_copy(update={"store": ""}))


def test_a_tombstone_ends_a_turn_that_never_opened(store: Store) -> None:
    turn = TurnDriver(store)

    result = turn.end(TurnStatus.CANCELLED, "cancelled")

    assert result is not None
    assert (result.status, result.conversation_version) == (TurnStatus.CANCELLED, 0)
    assert turn.kinds() == ["user_message", "turn_ended"]
    assert turn.transcript() == []
    with unchanged(store):
        assert TurnDriver(store).end() == result


def test_an_opening_that_comes_after_the_tombstone_finds_it_ended(store: Store) -> None:
    ended = TurnDriver(store).end()

    with unchanged(store):
        late = TurnDriver(store, acting=owner("second")).prepare()

    assert late.kind is PrepareKind.OVER
    assert late.result == ended


def test_a_tombstone_does_not_take_the_conversation_from_its_holder(store: Store) -> None:
    holder = TurnDriver(store)
    holder.prepare()

    TurnDriver(store, "request-2").end()

    assert store.read(read_conversation, "default", "talk").active_turn_id == holder.turn_id
    assert holder.answer().kind is PrepareKind.OVER


def test_a_tombstone_without_an_opening_is_a_lone_terminal_event(store: Store) -> None:
    turn = TurnDriver(store)
    turn.epoch = 3

    result = store.transact(end_turn, turn.end_command(TurnStatus.FAILED, "ledger_behind"))

    assert result is not None
    assert (result.status, result.stop_reason) == (TurnStatus.FAILED, "ledger_behind")
    assert turn.kinds() == ["turn_ended"]
    assert TurnDriver(store, acting=owner("second")).prepare().kind is PrepareKind.OVER


def test_a_reported_error_is_counted_once_for_each_attempt(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    failed = FailAttempt(turn=turn.ref, step=1, attempt=1, error_code="model_unavailable")
    assert store.transact(fail_model_attempt, failed) == 1

    with unchanged(store):
        assert store.transact(fail_model_attempt, failed) == 1

    turn.prepare()
    second = failed.model_copy(update={"attempt": 2})
    assert store.transact(fail_model_attempt, second) == 2
    assert rows(store, "select attempt, status, error_code from usage order by attempt") == [
        (1, "failed", "model_unavailable"),
        (2, "failed", "model_unavailable"),
    ]


def test_a_lost_attempt_is_no_reported_error(store: Store) -> None:
    turn = TurnDriver(store)
    for _ in range(5):
        turn.prepare()

    assert rows(store, "select errors, attempt from model_steps") == [(0, 5)]


def test_two_turns_share_their_conversation_without_a_gap(store: Store) -> None:
    first = TurnDriver(store).calling(("look", SAFE))
    first.run_call(SAFE)
    first.prepare(2)
    first.answer(2)
    second = TurnDriver(store, "request-2")
    second.prepare()
    second.answer()

    stored = rows(store, "select ordinal, turn_id, seq from events order by ordinal")

    assert [row[0] for row in stored] == list(range(1, len(stored) + 1))
    for turn in (first, second):
        seqs = [seq for _, turn_id, seq in stored if turn_id == turn.turn_id]
        assert seqs == list(range(1, len(seqs) + 1))
    # All facts of the first turn were committed before any of the second.
    assert [row[1] for row in stored] == sorted(
        (row[1] for row in stored), key=[first.turn_id, second.turn_id].index
    )


def test_commit_order_is_ordinal_order_also_where_turns_interleave(store: Store) -> None:
    first = TurnDriver(store)
    first.prepare()
    TurnDriver(store, "request-2").end()
    first.answer()

    stored = rows(store, "select turn_id from events order by ordinal")

    names = ["second" if row[0] != first.turn_id else "first" for row in stored]
    assert names == ["first", "first", "second", "second", "first", "first"]


def test_an_answer_that_was_committed_is_returned_and_never_asked_for_again(
    store: Store,
) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))

    with unchanged(store):
        state = turn.prepare(1)

    assert state.kind is PrepareKind.COMMITTED
    assert [call.index for call in state.pending] == [0]


def test_an_exact_retry_of_an_answer_changes_nothing(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    command = turn.answer_command(1, "", [("look", SAFE), ("send", UNSAFE)])
    first = store.transact(commit_answer, command)

    with unchanged(store):
        assert store.transact(commit_answer, command) == first
