"""The transcript: append-only messages, a version per append, and the atomic durable commit.

Instructions are never stored. Everything stored is sanitised at this single point (promise P12).
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, Row, bindparam, insert, select

from perdure.contracts.canonical import canonical_json, sanitise_text, sanitised
from perdure.contracts.conversation import ConversationState, TranscriptEntry
from perdure.contracts.errors import (
    CheckpointConflict,
    ConversationConflict,
    ConversationInvalid,
    ConversationMissing,
    LedgerCorruption,
    NamespaceMismatch,
)
from perdure.contracts.ids import TurnKey
from perdure.contracts.limits import WINDOW_MESSAGES_MAX
from perdure.contracts.messages import Message, Role
from perdure.stores.checkpoints import Checkpoint, is_stored, swap_checkpoint
from perdure.stores.clock import now
from perdure.stores.rows import create_conversation, lock_conversation, update_conversation
from perdure.stores.tables import CONVERSATIONS, TRANSCRIPT

_WINDOW = (
    select(TRANSCRIPT)
    .where(
        TRANSCRIPT.c.namespace == bindparam("namespace"),
        TRANSCRIPT.c.conversation_id == bindparam("conversation_id"),
        TRANSCRIPT.c.sequence.between(bindparam("first"), bindparam("last")),
    )
    .order_by(TRANSCRIPT.c.sequence)
)


class ConversationAppend(BaseModel):
    """Messages to append to a conversation of exactly that version."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    namespace: str
    conversation_id: str
    expected_version: int
    messages: tuple[Message, ...]

    @property
    def key(self) -> TurnKey:
        """The conversation, as the lock wants it."""
        return TurnKey(
            namespace=self.namespace, conversation_id=self.conversation_id, request_id="append"
        )


class DurableCommit(BaseModel):
    """Transcript append and checkpoint, or neither (seed 1.2 #15-16, promise P6)."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    append: ConversationAppend
    checkpoint: Checkpoint
    expected_revision: int


def ensure_conversation(tx: Connection, namespace: str, conversation_id: str) -> bool:
    """Create a conversation; False if it exists. Raises NamespaceMismatch if it is another's."""
    created = create_conversation(tx, namespace, conversation_id)
    if not created:
        read_conversation(tx, namespace, conversation_id)
    return created


def append_messages(tx: Connection, append: ConversationAppend) -> int:
    """Append and return the new version; exactly the same append again changes nothing.

    Raises ConversationInvalid for no messages or a system role, ConversationMissing,
    NamespaceMismatch, ConversationConflict for another version.
    """
    return _append_once(tx, append)[0]


def _append_once(tx: Connection, append: ConversationAppend) -> tuple[int, bool]:
    if not append.messages or any(item.role is Role.SYSTEM for item in append.messages):
        raise ConversationInvalid("an append needs at least one message and none of role system")
    conversation = lock_conversation(tx, append.key)
    if conversation is None:
        raise ConversationMissing(f"there is no conversation {append.conversation_id}")
    if _is_appended(tx, conversation, append):
        return conversation.version, False
    if conversation.version != append.expected_version:
        raise ConversationConflict(
            f"conversation {append.conversation_id} is at version {conversation.version}, "
            f"not {append.expected_version}"
        )
    if conversation.active_turn_id is not None:
        # Nothing but the claim's holder appends while a claim is open (DESIGN 4).
        raise ConversationConflict(
            f"conversation {append.conversation_id} is held by {conversation.active_turn_id}"
        )
    version, last_sequence = write_messages(tx, conversation, append.messages, None)
    update_conversation(tx, conversation, version=version, last_sequence=last_sequence)
    return version, True


def _is_appended(tx: Connection, conversation: Row[Any], append: ConversationAppend) -> bool:
    if conversation.version != append.expected_version + 1:
        return False
    stored = tx.execute(
        select(TRANSCRIPT.c.payload)
        .where(
            TRANSCRIPT.c.namespace == conversation.namespace,
            TRANSCRIPT.c.conversation_id == conversation.conversation_id,
            TRANSCRIPT.c.version == conversation.version,
            # What a turn wrote is not this caller's append.
            TRANSCRIPT.c.turn_id.is_(None),
        )
        .order_by(TRANSCRIPT.c.sequence)
    ).scalars()
    return list(stored) == [message_payload(message) for message in append.messages]


def commit_durable_turn(tx: Connection, commit: DurableCommit) -> int:
    """Append and swap the checkpoint in one transaction; returns the new version.

    Exactly the same commit again changes nothing.

    A failed precondition of either half leaves both as they were (seed 1.2 #15).
    """
    version, is_new = _append_once(tx, commit.append)
    if is_new:
        swap_checkpoint(tx, commit.checkpoint, commit.expected_revision)
    elif not is_stored(tx, commit.checkpoint):
        raise CheckpointConflict(
            f"the messages are there, but not with checkpoint {commit.checkpoint.checkpoint_id} "
            f"at revision {commit.checkpoint.revision}"
        )
    return version


def write_messages(
    tx: Connection, conversation: Row[Any], messages: Sequence[Message], turn_id: str | None
) -> tuple[int, int]:
    """Insert message rows for a locked conversation; returns its new version and last sequence."""
    version = conversation.version + 1
    moment = now()
    rows = [
        {
            "namespace": conversation.namespace,
            "conversation_id": conversation.conversation_id,
            "sequence": sequence,
            "version": version,
            "turn_id": turn_id,
            "role": message.role.value,
            "kind": message.kind.value,
            "text": sanitise_text(message.text),
            "payload": message_payload(message),
            "recorded_at": moment,
        }
        for sequence, message in enumerate(messages, start=conversation.last_sequence + 1)
    ]
    tx.execute(insert(TRANSCRIPT), rows)
    return version, conversation.last_sequence + len(rows)


def message_payload(message: Message) -> str:
    """The message as stored: canonical JSON without what a database cannot hold."""
    return canonical_json(sanitised(message.model_dump(mode="json")))


def list_transcript(
    tx: Connection,
    namespace: str,
    conversation_id: str,
    after: int = 0,
    limit: int = WINDOW_MESSAGES_MAX,
) -> list[TranscriptEntry]:
    """Entries with a sequence over `after`, at most `limit` (1..4096).

    Raises ConversationMissing, NamespaceMismatch, ConversationInvalid for another limit.
    """
    if not 1 <= limit <= WINDOW_MESSAGES_MAX:
        raise ConversationInvalid(f"limit is {limit}; it must be 1 to {WINDOW_MESSAGES_MAX}")
    read_conversation(tx, namespace, conversation_id)
    return read_window(tx, namespace, conversation_id, after + 1, after + limit)


def read_window(
    tx: Connection, namespace: str, conversation_id: str, first: int, last: int
) -> list[TranscriptEntry]:
    """Entries with sequences `first..last`."""
    key = {"namespace": namespace, "conversation_id": conversation_id}
    rows = tx.execute(_WINDOW, {**key, "first": first, "last": last}).all()
    return [_entry(row) for row in rows]


def read_conversation(tx: Connection, namespace: str, conversation_id: str) -> ConversationState:
    """Raises ConversationMissing, NamespaceMismatch."""
    row = tx.execute(
        select(CONVERSATIONS).where(CONVERSATIONS.c.conversation_id == conversation_id)
    ).one_or_none()
    if row is None:
        raise ConversationMissing(f"there is no conversation {conversation_id}")
    if row.namespace != namespace:
        raise NamespaceMismatch(f"conversation {conversation_id} is in another namespace")
    return ConversationState(
        namespace=row.namespace,
        conversation_id=row.conversation_id,
        version=row.version,
        last_sequence=row.last_sequence,
        active_turn_id=row.active_turn_id,
    )


def _entry(row: Row[Any]) -> TranscriptEntry:
    try:
        message = Message.model_validate(json.loads(row.payload))
    except ValueError:
        raise LedgerCorruption(
            "transcript", f"message {row.sequence} of {row.conversation_id} cannot be decoded"
        ) from None
    return TranscriptEntry(
        sequence=row.sequence,
        version=row.version,
        turn_id=row.turn_id,
        message=message,
        recorded_at=row.recorded_at,
    )
