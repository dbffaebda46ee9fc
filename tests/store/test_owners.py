"""Who acts for a turn and who holds a conversation: epochs, take-over, eviction."""

from collections.abc import Callable
from typing import Any

import pytest
from harness.ledger_driver import (
    SAFE,
    UNSAFE,
    TurnDriver,
    owner,
    rows,
    unchanged,
)

from perdure.contracts.errors import (
    Fenced,
)
from perdure.contracts.messages import MessageKind, user_message
from perdure.contracts.tools import ResultReason
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store
from perdure.stores.commands import DispatchKind, Eviction, PrepareKind
from perdure.stores.ledger import (
    load_context,
    read_result,
)
from perdure.stores.transcript import (
    read_conversation,
)


def test_a_turn_of_another_owner_is_followed(store: Store) -> None:
    TurnDriver(store).prepare()
    other = TurnDriver(store, acting=owner("second"))

    with unchanged(store):
        state = other.prepare()

    assert (state.kind, state.epoch) == (PrepareKind.FOLLOW, 1)


def test_the_owner_of_an_open_turn_goes_on_at_once(store: Store) -> None:
    """A reset of the owner's own chain of runs opens again: the first run's id is the same."""
    first = TurnDriver(store).calling(("look", SAFE))

    again = TurnDriver(store).prepare()

    assert again.kind is PrepareKind.COMMITTED
    assert again.epoch == first.epoch
    assert [call.tool for call in again.pending] == ["look"]


def test_taking_over_raises_the_epoch_and_keeps_the_former_owner(store: Store) -> None:
    TurnDriver(store).prepare()
    second = TurnDriver(store, acting=owner("second"))

    state = second.prepare(opening=second.opening(take_over=1))

    assert (state.kind, state.epoch) == (PrepareKind.READY, 2)
    assert rows(store, "select epoch, workflow_id, reason from turn_owners order by epoch") == [
        (1, "turn/first", "opened"),
        (2, "turn/second", "taken_over"),
    ]


def test_only_one_of_two_can_take_over_from_the_same_owner(store: Store) -> None:
    TurnDriver(store).prepare()
    second = TurnDriver(store, acting=owner("second"))
    third = TurnDriver(store, acting=owner("third"))
    second.prepare(opening=second.opening(take_over=1))

    with unchanged(store):
        state = third.prepare(opening=third.opening(take_over=1))

    assert (state.kind, state.epoch) == (PrepareKind.FOLLOW, 2)


def _prepare(old: TurnDriver) -> Any:
    return old.prepare(2).kind


def _dispatch(old: TurnDriver) -> Any:
    return old.dispatch("token", UNSAFE).kind


def _close(old: TurnDriver) -> Any:
    return old.close(ResultReason.TOOL_UNAVAILABLE).kind


def _end(old: TurnDriver) -> Any:
    return old.end()


@pytest.mark.parametrize(
    ("act", "answer"),
    [
        (_prepare, PrepareKind.FOLLOW),
        (_dispatch, DispatchKind.FENCED),
        (_close, DispatchKind.FENCED),
        (_end, None),
    ],
)
def test_an_older_epoch_can_do_nothing(
    store: Store, act: Callable[[TurnDriver], Any], answer: Any
) -> None:
    old = TurnDriver(store).calling(("send", UNSAFE))
    new = TurnDriver(store, acting=owner("second"))
    new.prepare(opening=new.opening(take_over=1))

    with unchanged(store):
        assert act(old) == answer


def test_an_older_epoch_cannot_commit_an_answer(store: Store) -> None:
    old = TurnDriver(store)
    old.prepare()
    new = TurnDriver(store, acting=owner("second"))
    new.prepare(opening=new.opening(take_over=1))

    with unchanged(store), pytest.raises(Fenced, match="epoch 2"):
        old.answer()


def test_an_owner_who_does_not_know_the_epoch_ends_only_its_own_turn(store: Store) -> None:
    TurnDriver(store).prepare()
    stranger = TurnDriver(store, acting=owner("second"))

    with unchanged(store):
        assert stranger.end() is None

    ended = TurnDriver(store).end()
    assert ended is not None
    assert ended.status is TurnStatus.CANCELLED


def test_a_held_conversation_names_its_holder_and_writes_nothing(store: Store) -> None:
    holder = TurnDriver(store)
    holder.prepare()
    other = TurnDriver(store, "request-2", acting=owner("second"))

    with unchanged(store):
        state = other.prepare()

    assert state.kind is PrepareKind.BUSY
    assert state.holder is not None
    assert (state.holder.turn_id, state.holder.epoch) == (holder.turn_id, 1)
    assert state.holder.owner == holder.owner


def test_a_dead_holder_is_ended_in_the_transaction_that_takes_its_claim(store: Store) -> None:
    dead = TurnDriver(store).calling(("send", UNSAFE), ("look", SAFE))
    dead.dispatch("token", UNSAFE)
    heir = TurnDriver(store, "request-2", acting=owner("second"))

    state = heir.prepare(eviction=Eviction(turn_id=dead.turn_id, epoch=1))

    assert state.kind is PrepareKind.READY
    result = store.read(read_result, dead.turn_id)
    assert result is not None
    assert (result.status, result.stop_reason) == (TurnStatus.FAILED, "turn_lost")
    assert dead.kinds()[-3:] == ["tool_settled", "tool_settled", "turn_ended"]
    assert dead.transcript()[-1].kind is MessageKind.MARKER
    assert store.read(read_conversation, "default", "talk").active_turn_id == heir.turn_id
    ordinals = [row[0] for row in rows(store, "select ordinal from events order by ordinal")]
    assert ordinals == list(range(1, len(ordinals) + 1))


def test_the_heir_sees_what_the_dead_turn_left(store: Store) -> None:
    dead = TurnDriver(store, message="first").calling(("send", UNSAFE))
    heir = TurnDriver(store, "request-2", message="second", acting=owner("second"))

    state = heir.prepare(eviction=Eviction(turn_id=dead.turn_id, epoch=1))

    assert state.prepared is not None
    context = store.read(load_context, heir.turn_id, state.prepared)
    assert context.messages[:-1] == tuple(dead.transcript())
    assert context.messages[-1] == user_message("second")


@pytest.mark.parametrize(("name", "epoch"), [("request-1", 2), ("request-9", 1)])
def test_an_eviction_of_somebody_else_changes_nothing(store: Store, name: str, epoch: int) -> None:
    TurnDriver(store).prepare()
    named = TurnDriver(store, name).turn_id
    other = TurnDriver(store, "request-2", acting=owner("second"))

    with unchanged(store):
        state = other.prepare(eviction=Eviction(turn_id=named, epoch=epoch))

    assert state.kind is PrepareKind.BUSY
