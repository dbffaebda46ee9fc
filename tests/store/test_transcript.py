"""The transcript: versions count appends, sequences count messages, and the atomic durable commit.

What belongs to another namespace, another version or an open turn is refused and nothing is kept.
"""

from typing import Any

import pytest
from harness.ledger_driver import TurnDriver, contents, unchanged

from perdure.contracts.errors import (
    CheckpointConflict,
    CheckpointMissing,
    ConversationConflict,
    ConversationInvalid,
    ConversationMissing,
    NamespaceMismatch,
)
from perdure.contracts.messages import (
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    assistant_message,
    user_message,
)
from perdure.stores import Store
from perdure.stores.checkpoints import Checkpoint, load_checkpoint, swap_checkpoint
from perdure.stores.transcript import (
    ConversationAppend,
    DurableCommit,
    append_messages,
    commit_durable_turn,
    ensure_conversation,
    list_transcript,
    read_conversation,
)

HERE = ("tenant.user", "talk")
FOUR = (
    user_message("I prefer tea"),
    assistant_message("Noted"),
    user_message("Go on"),
    assistant_message("Going on"),
)


def _append(version: int = 0, messages: tuple[Message, ...] = FOUR, **changes: Any) -> Any:
    values = {"namespace": HERE[0], "conversation_id": HERE[1]} | changes
    return ConversationAppend(expected_version=version, messages=messages, **values)


def _conversation(store: Store, *, appended: bool = False) -> Store:
    store.transact(ensure_conversation, *HERE)
    if appended:
        store.transact(append_messages, _append())
    return store


def test_a_conversation_is_created_once(store: Store) -> None:
    assert store.transact(ensure_conversation, *HERE)

    with unchanged(store):
        assert not store.transact(ensure_conversation, *HERE)

    state = store.read(read_conversation, *HERE)
    assert (state.version, state.last_sequence, state.active_turn_id) == (0, 0, None)


def test_the_version_counts_appends_and_the_sequence_counts_messages(store: Store) -> None:
    _conversation(store)

    assert store.transact(append_messages, _append()) == 1
    assert store.transact(append_messages, _append(1, FOUR[:1])) == 2

    entries = store.read(list_transcript, *HERE)
    assert [entry.sequence for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry.version for entry in entries] == [1, 1, 1, 1, 2]
    assert tuple(entry.message for entry in entries[:4]) == FOUR


@pytest.mark.parametrize("version", [0, 2, 99])
def test_an_append_to_another_version_is_a_conflict(store: Store, version: int) -> None:
    _conversation(store, appended=True)
    other = (user_message("other words"),)

    with unchanged(store), pytest.raises(ConversationConflict):
        store.transact(append_messages, _append(version, other))


def test_an_exact_retry_of_an_append_changes_nothing(store: Store) -> None:
    _conversation(store, appended=True)

    with unchanged(store):
        assert store.transact(append_messages, _append()) == 1


def test_an_append_is_no_retry_once_the_conversation_went_on(store: Store) -> None:
    _conversation(store, appended=True)
    store.transact(append_messages, _append(1, FOUR[:1]))

    with unchanged(store), pytest.raises(ConversationConflict):
        store.transact(append_messages, _append())


@pytest.mark.parametrize("messages", [(), (Message(role=Role.SYSTEM),)])
def test_an_append_without_messages_or_with_instructions_is_invalid(
    store: Store, messages: tuple[Message, ...]
) -> None:
    _conversation(store)

    with unchanged(store), pytest.raises(ConversationInvalid):
        store.transact(append_messages, _append(0, messages))


def test_the_namespace_is_a_second_key_everywhere(store: Store) -> None:
    _conversation(store, appended=True)
    elsewhere = ("tenant.other", HERE[1])

    with unchanged(store):
        with pytest.raises(NamespaceMismatch):
            store.transact(ensure_conversation, *elsewhere)
        with pytest.raises(NamespaceMismatch):
            store.transact(append_messages, _append(1, namespace=elsewhere[0]))
        with pytest.raises(NamespaceMismatch):
            store.read(list_transcript, *elsewhere)
        with pytest.raises(NamespaceMismatch):
            store.read(read_conversation, *elsewhere)


def test_a_conversation_that_does_not_exist_is_missing_and_not_somebody_elses(
    store: Store,
) -> None:
    with unchanged(store):
        with pytest.raises(ConversationMissing):
            store.transact(append_messages, _append())
        with pytest.raises(ConversationMissing):
            store.read(list_transcript, *HERE)


@pytest.mark.parametrize(
    ("after", "limit", "sequences"),
    [(0, 2, [1, 2]), (2, 8, [3, 4]), (4, 8, []), (1, 1, [2]), (0, 4096, [1, 2, 3, 4])],
)
def test_the_transcript_is_listed_strictly_after_a_sequence(
    store: Store, after: int, limit: int, sequences: list[int]
) -> None:
    _conversation(store, appended=True)

    entries = store.read(list_transcript, *HERE, after=after, limit=limit)

    assert [entry.sequence for entry in entries] == sequences


@pytest.mark.parametrize("limit", [0, -1, 4097])
def test_a_limit_outside_the_window_is_invalid(store: Store, limit: int) -> None:
    _conversation(store)

    with pytest.raises(ConversationInvalid, match="1 to 4096"):
        store.read(list_transcript, *HERE, limit=limit)


def test_nothing_but_the_turn_that_holds_a_conversation_appends_to_it(store: Store) -> None:
    turn = TurnDriver(store, namespace=HERE[0], conversation=HERE[1])
    turn.prepare()

    with unchanged(store), pytest.raises(ConversationConflict, match=turn.turn_id):
        store.transact(append_messages, _append())

    turn.answer()
    assert store.transact(append_messages, _append(1)) == 2


def test_every_kind_of_part_is_kept_unchanged(store: Store) -> None:
    _conversation(store)
    parts = (
        ThinkingPart(text="hm", provider_data={"signature": "opaque", "n": 2**70}),
        TextPart(text="with \u2028 and 😀"),
        ToolCallPart(call_id="c", provider_call_id="p", name="look", arguments={"a": [1, None]}),
        ToolResultPart(call_id="c", name="look", text="seen", is_error=True, flags=("cut",)),
    )
    message = Message(role=Role.ASSISTANT, parts=parts)

    store.transact(append_messages, _append(0, (message,)))

    [entry] = store.read(list_transcript, *HERE)
    assert entry.message == message


INITIAL = Checkpoint(checkpoint_id="turn", kind="test.durable", schema_version=1)


def _commit(revision: int = 0, **changes: Any) -> DurableCommit:
    values: dict[str, Any] = {
        "append": _append(),
        "checkpoint": INITIAL.next({"phase": "completed"}),
        "expected_revision": revision,
    }
    return DurableCommit(**{**values, **changes})


def test_a_durable_commit_appends_and_completes_the_checkpoint(store: Store) -> None:
    _conversation(store)
    store.transact(swap_checkpoint, INITIAL, None)

    assert store.transact(commit_durable_turn, _commit()) == 1

    assert len(store.read(list_transcript, *HERE)) == 4
    stored = store.read(load_checkpoint, "turn")
    assert (stored.revision, stored.payload) == (1, {"phase": "completed"})


def test_an_exact_retry_of_a_durable_commit_changes_nothing(store: Store) -> None:
    _conversation(store)
    store.transact(swap_checkpoint, INITIAL, None)
    store.transact(commit_durable_turn, _commit())

    with unchanged(store):
        assert store.transact(commit_durable_turn, _commit()) == 1


def test_a_stale_checkpoint_rolls_the_transcript_back(store: Store) -> None:
    _conversation(store)
    store.transact(swap_checkpoint, INITIAL, None)
    message = (user_message("must roll back"),)

    with unchanged(store), pytest.raises(CheckpointConflict):
        store.transact(commit_durable_turn, _commit(7, append=_append(0, message)))

    assert store.read(list_transcript, *HERE) == []
    assert store.read(load_checkpoint, "turn").revision == 0
    assert store.read(read_conversation, *HERE).version == 0


def test_a_missing_checkpoint_rolls_the_transcript_back(store: Store) -> None:
    _conversation(store)

    with unchanged(store), pytest.raises(CheckpointMissing):
        store.transact(commit_durable_turn, _commit())


@pytest.mark.parametrize(
    ("append", "error"),
    [
        (_append(5), ConversationConflict),
        (_append(0, ()), ConversationInvalid),
        (_append(0, namespace="tenant.other"), NamespaceMismatch),
        (_append(0, conversation_id="none-such"), ConversationMissing),
    ],
)
def test_a_refused_append_leaves_the_checkpoint_as_it_was(
    store: Store, append: ConversationAppend, error: type[Exception]
) -> None:
    _conversation(store)
    store.transact(swap_checkpoint, INITIAL, None)

    with unchanged(store), pytest.raises(error):
        store.transact(commit_durable_turn, _commit(append=append))


def test_a_retry_of_the_append_with_another_checkpoint_is_a_conflict(store: Store) -> None:
    _conversation(store)
    store.transact(swap_checkpoint, INITIAL, None)
    store.transact(commit_durable_turn, _commit())
    other = INITIAL.next({"phase": "another"})
    before = contents(store)

    with pytest.raises((CheckpointConflict, ConversationConflict)):
        store.transact(commit_durable_turn, _commit(checkpoint=other))

    assert contents(store) == before
