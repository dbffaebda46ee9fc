"""Checkpoints of any kind: written only by compare-and-swap, read only by who understands them."""

import pytest
from harness.ledger_driver import TurnDriver, damage, unchanged

from perdure.contracts.errors import (
    CheckpointConflict,
    CheckpointMissing,
    CheckpointUnsupported,
    LedgerCorruption,
)
from perdure.stores import Store
from perdure.stores.checkpoints import (
    TURN_KIND,
    TURN_SCHEMA_VERSION,
    Checkpoint,
    load_checkpoint,
    swap_checkpoint,
)

NEW = Checkpoint(
    checkpoint_id="one", kind="test.durable", schema_version=1, payload={"phase": "initial"}
)


def _stored(store: Store, revision: int) -> Checkpoint:
    checkpoint = NEW
    store.transact(swap_checkpoint, checkpoint, None)
    for number in range(revision):
        checkpoint = checkpoint.next({"phase": number})
        store.transact(swap_checkpoint, checkpoint, number)
    return checkpoint


def test_a_checkpoint_of_any_kind_can_be_created_and_read_back(store: Store) -> None:
    store.transact(swap_checkpoint, NEW, None)

    assert store.read(load_checkpoint, "one") == NEW


def test_the_next_checkpoint_has_the_same_identity_and_one_revision_more() -> None:
    following = NEW.next({"phase": "completed"})

    assert following.revision == NEW.revision + 1
    assert following.payload == {"phase": "completed"}
    assert (following.checkpoint_id, following.kind, following.schema_version) == (
        NEW.checkpoint_id,
        NEW.kind,
        NEW.schema_version,
    )


def test_a_swap_replaces_the_whole_payload(store: Store) -> None:
    checkpoint = _stored(store, 0)

    store.transact(swap_checkpoint, checkpoint.next({"other": [1, 2]}), 0)

    stored = store.read(load_checkpoint, "one")
    assert (stored.revision, stored.payload) == (1, {"other": [1, 2]})


@pytest.mark.parametrize(
    ("stored", "new", "expected", "error"),
    [
        (None, 1, None, CheckpointConflict),
        (None, 1, 0, CheckpointMissing),
        (None, 0, 0, CheckpointConflict),
        (0, 0, None, CheckpointConflict),
        (0, 2, 0, CheckpointConflict),
        (0, 2, 1, CheckpointConflict),
        (0, 8, 7, CheckpointConflict),
        (2, 1, 0, CheckpointConflict),
        (2, 3, 1, CheckpointConflict),
        (2, 0, None, CheckpointConflict),
    ],
)
def test_a_swap_that_does_not_fit_writes_nothing(
    store: Store, stored: int | None, new: int, expected: int | None, error: type[Exception]
) -> None:
    if stored is not None:
        _stored(store, stored)
    checkpoint = NEW.model_copy(update={"revision": new, "payload": {"phase": "other"}})

    with unchanged(store), pytest.raises(error):
        store.transact(swap_checkpoint, checkpoint, expected)


def test_a_checkpoint_that_is_not_there_is_missing(store: Store) -> None:
    with pytest.raises(CheckpointMissing, match="none-such"):
        store.read(load_checkpoint, "none-such")


@pytest.mark.parametrize(
    ("kind", "version", "understood"),
    [
        ("test.durable", 1, True),
        ("test.durable", 2, True),
        ("test.other", 1, False),
    ],
)
def test_a_reader_gets_only_what_it_understands(
    store: Store, kind: str, version: int, understood: bool
) -> None:
    _stored(store, 0)
    stored = store.read(load_checkpoint, "one")

    if understood:
        assert stored.require(kind, version) == stored
    else:
        with pytest.raises(CheckpointUnsupported, match=r"test\.durable version 1"):
            stored.require(kind, version)


def test_a_checkpoint_of_a_newer_program_is_refused() -> None:
    newer = NEW.model_copy(update={"schema_version": 3})

    with pytest.raises(CheckpointUnsupported, match="up to version 2"):
        newer.require("test.durable", 2)


def test_a_payload_that_is_no_json_is_damage(store: Store) -> None:
    _stored(store, 0)
    damage(store, "update checkpoints set payload = '{'")

    with pytest.raises(LedgerCorruption):
        store.read(load_checkpoint, "one")


@pytest.mark.parametrize("payload", ["[1]", "null", "3"])
def test_a_payload_that_is_no_object_is_damage(store: Store, payload: str) -> None:
    _stored(store, 0)
    damage(store, "update checkpoints set payload = :payload", payload=payload)

    with pytest.raises(LedgerCorruption):
        store.read(load_checkpoint, "one")


def test_a_turn_keeps_its_own_checkpoint_of_its_own_kind(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    opened = store.read(load_checkpoint, turn.turn_id)
    turn.answer()

    completed = store.read(load_checkpoint, turn.turn_id).require(TURN_KIND, TURN_SCHEMA_VERSION)

    assert opened.payload["phase"] == "model"
    assert (completed.revision, completed.payload["phase"]) == (1, "completed")
    assert completed.payload["version"] == 1
