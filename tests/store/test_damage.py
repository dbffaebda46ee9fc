"""A damaged ledger is found out, typed, and does nothing but end the turn (promise P10)."""

from collections.abc import Callable, Iterator

import pytest
from harness.ledger_driver import SAFE, UNSAFE, TurnDriver, damage, owner, rows, unchanged

from perdure.contracts.errors import LedgerCorruption, LedgerRejection
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store, open_store
from perdure.stores.commands import Eviction, PrepareKind
from perdure.stores.queries import Reader
from perdure.stores.transcript import read_conversation

GAP = "delete from events where turn_id = :turn and seq = :seq"
PAYLOAD = (
    "update events set payload = replace(payload, 'talk', 'tale')"
    " where turn_id = :turn and seq = :seq"
)
DIGEST = "update events set digest = 'x' || digest where turn_id = :turn and seq = :seq"
GARBAGE = "update events set payload = 'no json' where turn_id = :turn and seq = :seq"
OTHER_KIND = "update events set kind = 'tool_settled' where turn_id = :turn and seq = :seq"
OTHER_ID = "update events set event_id = 'another' where turn_id = :turn and seq = :seq"
SWAPPED = (
    "update events set payload = (select payload from events where turn_id = :turn and seq = 1)"
    " where turn_id = :turn and seq = :seq"
)
WAYS = {
    "gap": (GAP, "seq_gap"),
    "payload": (PAYLOAD, "digest_mismatch"),
    "digest": (DIGEST, "digest_mismatch"),
    "garbage": (GARBAGE, "digest_mismatch"),
    "swapped": (SWAPPED, "digest_mismatch"),
    "kind": (OTHER_KIND, "row_payload_mismatch"),
    "id": (OTHER_ID, "row_payload_mismatch"),
}
EACH_WAY = pytest.mark.parametrize("way", sorted(WAYS))


@pytest.fixture
def store() -> Iterator[Store]:
    """One store is enough: what is read back is checked by the same code everywhere."""
    opened = open_store("sqlite://")
    yield opened
    opened.close()


def _turn(store: Store) -> TurnDriver:
    """Seq 1 user, 2 prepared, 3 answered, 4 and 5 calls."""
    return TurnDriver(store).calling(("look", SAFE), ("send", UNSAFE))


def _damage(turn: TurnDriver, way: str, seq: int) -> str:
    statement, reason = WAYS[way]
    damage(turn.store, statement, turn=turn.turn_id, seq=seq)
    return reason


@EACH_WAY
@pytest.mark.parametrize("seq", [2, 4])
def test_reading_a_damaged_turn_is_a_typed_error(store: Store, way: str, seq: int) -> None:
    turn = _turn(store)
    reason = _damage(turn, way, seq)

    with pytest.raises(LedgerCorruption) as caught:
        Reader(store).turn_events(turn.turn_id)

    assert caught.value.reason == reason
    assert "hello" not in str(caught.value)


@EACH_WAY
def test_no_effect_starts_on_a_damaged_call(store: Store, way: str) -> None:
    turn = _turn(store)
    _damage(turn, way, 4)

    with unchanged(store), pytest.raises((LedgerCorruption, LedgerRejection)):
        turn.dispatch("token", SAFE)


def test_arguments_that_were_changed_in_the_database_are_never_used(store: Store) -> None:
    turn = _turn(store)
    damage(
        store,
        "update events set payload = replace(payload, :was, :becomes) where seq = 4",
        was='"number":0',
        becomes='"number":9',
    )

    with unchanged(store), pytest.raises(LedgerCorruption) as caught:
        turn.dispatch("token", SAFE)

    assert caught.value.reason == "digest_mismatch"


@EACH_WAY
def test_a_damaged_end_of_the_chain_takes_no_further_fact(store: Store, way: str) -> None:
    turn = _turn(store)
    _damage(turn, way, 4 if way == "gap" else 5)

    if way in ("kind", "id"):
        # The chain itself is whole; what the row says of the call is not believed.
        with unchanged(store), pytest.raises((LedgerCorruption, LedgerRejection)):
            turn.dispatch("token", UNSAFE, index=1)
    else:
        with unchanged(store), pytest.raises(LedgerCorruption):
            turn.dispatch("token", UNSAFE, index=0)


@pytest.mark.parametrize(
    ("way", "seq"),
    [(way, seq) for way in sorted(WAYS) for seq in (1, 3, 4) if (way, seq) != ("swapped", 1)],
)
def test_a_damaged_turn_still_gets_its_terminal_event_and_frees_the_conversation(
    store: Store, way: str, seq: int
) -> None:
    turn = _turn(store)
    turn.dispatch("token", UNSAFE, index=1)
    _damage(turn, way, seq)

    result = turn.end(TurnStatus.FAILED, "ledger_corruption")
    with unchanged(store):
        again = turn.end(TurnStatus.FAILED, "ledger_corruption")

    assert result is not None
    assert again == result
    assert (result.status, result.stop_reason) == (TurnStatus.FAILED, "ledger_corruption")
    [(last, kind)] = rows(
        store,
        "select seq, kind from events where turn_id = :t order by seq desc limit 1",
        t=turn.turn_id,
    )
    assert (last, kind) == (7, "turn_ended")
    assert store.read(read_conversation, "default", "talk").active_turn_id is None
    following = TurnDriver(store, "request-2")
    following.prepare()
    assert following.answer().result is not None


@pytest.mark.parametrize("way", ["payload", "digest", "garbage"])
def test_the_terminal_event_of_a_damaged_turn_names_the_unclosed_calls(
    store: Store, way: str
) -> None:
    turn = _turn(store)
    turn.dispatch("token", UNSAFE, index=1)
    _damage(turn, way, 3)

    turn.end(TurnStatus.FAILED, "ledger_corruption")

    events = Reader(store).events("default", "talk", after=6)
    ended = events[-1].event
    assert ended.kind == "turn_ended"
    assert set(ended.unclosed) == {turn.operation_id(0), turn.operation_id(1)}
    assert turn.transcript() == []


def test_a_damaged_turn_ended_by_its_successor_does_not_block_it(store: Store) -> None:
    dead = _turn(store)
    _damage(dead, "digest", 2)
    heir = TurnDriver(store, "request-2", acting=owner("second"))

    state = heir.prepare(eviction=Eviction(turn_id=dead.turn_id, epoch=1))

    assert state.kind is PrepareKind.READY


def test_a_lost_checkpoint_does_not_keep_a_turn_from_ending(store: Store) -> None:
    turn = _turn(store)
    damage(store, "delete from checkpoints")

    result = turn.end(TurnStatus.FAILED, "ledger_corruption")

    assert result is not None
    assert result.status is TurnStatus.FAILED
    assert store.read(read_conversation, "default", "talk").active_turn_id is None


@pytest.mark.parametrize(
    "statement",
    [
        "update checkpoints set payload = 'no json'",
        "update checkpoints set kind = 'something.else'",
        "update checkpoints set schema_version = 99",
    ],
)
def test_a_damaged_checkpoint_does_not_keep_a_turn_from_ending(
    store: Store, statement: str
) -> None:
    turn = _turn(store)
    damage(store, statement)

    result = turn.end(TurnStatus.FAILED, "ledger_corruption")

    assert result is not None
    assert result.status is TurnStatus.FAILED


@pytest.mark.parametrize(
    "statement",
    [
        "update conversations set last_ordinal = 0",
        "update conversations set last_sequence = 0",
    ],
)
def test_damaged_counters_do_not_keep_a_turn_from_ending(store: Store, statement: str) -> None:
    first = TurnDriver(store, "request-0")
    first.prepare()
    first.answer()
    turn = _turn(store)
    damage(store, statement)

    result = turn.end(TurnStatus.FAILED, "ledger_corruption")

    assert result is not None
    assert result.status is TurnStatus.FAILED
    assert store.read(read_conversation, "default", "talk").active_turn_id is None


def test_a_damaged_transcript_is_a_typed_error(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    turn.answer()
    damage(store, "update transcript set payload = 'no json' where sequence = 2")

    with pytest.raises(LedgerCorruption) as caught:
        turn.transcript()

    assert caught.value.reason == "transcript"


def test_a_damaged_turn_does_not_keep_another_conversation_from_working(store: Store) -> None:
    turn = _turn(store)
    _damage(turn, "digest", 2)
    other = TurnDriver(store, conversation="elsewhere")
    other.prepare()

    assert other.answer().result is not None


def _prepare_again(turn: TurnDriver) -> object:
    return turn.prepare(1)


def _answer_finally(turn: TurnDriver) -> object:
    return turn.answer(1)


@pytest.mark.parametrize("act", [_prepare_again, _answer_finally])
def test_a_damaged_question_is_neither_sent_nor_answered(
    store: Store, act: Callable[[TurnDriver], object]
) -> None:
    turn = TurnDriver(store, message="pay 10")
    turn.prepare()
    damage(store, "update events set payload = replace(payload, 'pay 10', 'pay 99') where seq = 1")

    with unchanged(store), pytest.raises(LedgerCorruption):
        act(turn)
