"""Every table of the ledger. Rows are not contracts: values are validated before they get here.

Authority: identity, events, owners, checkpoints, receipts, attempts, blobs, usage. Projections,
which can be rebuilt from events: conversations' counters, turns, operations, journal, transcript.
Beside the ledger: partial segments, aborted partials, late results. Instants are aware UTC;
`alive_at_ms` is the database's own clock.
"""

# A table's name is a plain string; SQLAlchemy declares the attribute as a descriptor.
# pyright: reportAssignmentType=false

from datetime import datetime
from typing import Any, cast

from sqlalchemy import BigInteger, Column, Index, MetaData, Table, Text, UniqueConstraint, false
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Row(SQLModel, registry=registry(metadata=MetaData(naming_convention=_NAMING))):
    """Base of our tables: a registry of its own keeps a user's `SQLModel.metadata` clean."""


def _text(*, nullable: bool = False) -> Any:
    return Column(Text, nullable=nullable)


class StoreIdentityRow(Row, table=True):
    """Which ledger this is; every activity after the first compares it."""

    __tablename__ = "store_identity"
    singleton: int = Field(primary_key=True)
    store_id: str
    created_at: datetime


class ConversationRow(Row, table=True):
    """Counters of a conversation and the turn that holds it: the row that every command locks."""

    __tablename__ = "conversations"
    conversation_id: str = Field(primary_key=True)
    namespace: str
    version: int
    last_sequence: int
    last_ordinal: int
    active_turn_id: str | None
    created_at: datetime
    updated_at: datetime


class EventRow(Row, table=True):
    """An immutable fact: `seq` in its turn, `ordinal` in its conversation, digest chained."""

    __tablename__ = "events"
    __table_args__ = (UniqueConstraint("namespace", "conversation_id", "ordinal"),)
    turn_id: str = Field(primary_key=True)
    seq: int = Field(primary_key=True)
    event_id: str = Field(unique=True)
    namespace: str
    conversation_id: str
    ordinal: int
    kind: str
    payload: str = Field(sa_column=_text())
    digest: str
    recorded_at: datetime


class TurnRow(Row, table=True):
    """One turn, as projected from its events; `epoch` is the newest of its owners."""

    __tablename__ = "turns"
    __table_args__ = (UniqueConstraint("namespace", "conversation_id", "request_id"),)
    turn_id: str = Field(primary_key=True)
    namespace: str
    conversation_id: str
    request_id: str
    agent: str
    status: str
    stop_reason: str | None
    detail: str | None
    request_digest: str
    epoch: int
    expected_version: int
    conversation_version: int
    steps: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    answer: str | None = Field(sa_column=_text(nullable=True))
    answer_is_output: bool = Field(sa_column_kwargs={"server_default": false()})
    opened_at: datetime
    ended_at: datetime | None


class TurnOwnerRow(Row, table=True):
    """Who acted for a turn, one row per epoch."""

    __tablename__ = "turn_owners"
    turn_id: str = Field(primary_key=True)
    epoch: int = Field(primary_key=True)
    temporal_namespace: str
    workflow_id: str
    run_id: str
    reason: str
    taken_at: datetime


class CheckpointRow(Row, table=True):
    """A resumable state: written only by compare-and-swap on `revision`."""

    __tablename__ = "checkpoints"
    checkpoint_id: str = Field(primary_key=True)
    kind: str
    schema_version: int
    revision: int
    payload: str = Field(sa_column=_text())
    updated_at: datetime


class ReceiptRow(Row, table=True):
    """What a request became; deduplicates by request id."""

    __tablename__ = "receipts"
    namespace: str = Field(primary_key=True)
    conversation_id: str = Field(primary_key=True)
    request_id: str = Field(primary_key=True)
    request_digest: str
    disposition: str
    turn_id: str
    recorded_at: datetime


class ModelStepRow(Row, table=True):
    """A model step: its current attempt fences segments and the answer of older ones."""

    __tablename__ = "model_steps"
    turn_id: str = Field(primary_key=True)
    step: int = Field(primary_key=True)
    attempt: int
    token: str
    prepared: int
    errors: int
    answered: bool


class UsageRow(Row, table=True):
    """One attempt of a model step: what it cost and how it ended."""

    __tablename__ = "usage"
    turn_id: str = Field(primary_key=True)
    step: int = Field(primary_key=True)
    attempt: int = Field(primary_key=True)
    status: str
    model: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    error_code: str | None
    worker: str
    started_at: datetime
    ended_at: datetime | None


class OperationRow(Row, table=True):
    """One tool call as a durable effect (seed 3.3, T1 record)."""

    __tablename__ = "operations"
    __table_args__ = (UniqueConstraint("turn_id", "step", "call_index"),)
    operation_id: str = Field(primary_key=True)
    turn_id: str
    step: int
    call_index: int
    namespace: str
    conversation_id: str
    agent: str
    tool: str
    provider_call_id: str = Field(sa_column=_text())
    arguments_digest: str
    safety: str
    state: str
    status: str | None
    generation: int
    call_event_id: str
    dispatch_event_id: str
    outcome_event_id: str | None
    version: int
    prepared_at: datetime
    settled_at: datetime | None


class OperationAttemptRow(Row, table=True):
    """One allowed execution: never dropped; the gate decides on these and on events."""

    __tablename__ = "operation_attempts"
    operation_id: str = Field(primary_key=True)
    generation: int = Field(primary_key=True)
    token: str = Field(unique=True)
    safety: str
    worker: str
    activity: str
    activity_attempt: int
    started_at: datetime
    alive_at_ms: int = Field(sa_type=BigInteger)
    stopped: bool
    outcome: str | None


class JournalRow(Row, table=True):
    """The two states of an operation, each pointing to its event."""

    __tablename__ = "journal"
    journal_id: str = Field(primary_key=True)
    operation_id: str = Field(index=True)
    state: str
    event_id: str
    recorded_at: datetime


class LateResultRow(Row, table=True):
    """A result that came after its call was closed; it never changes what the model was told."""

    __tablename__ = "late_results"
    operation_id: str = Field(primary_key=True)
    token: str = Field(primary_key=True)
    turn_id: str = Field(index=True)
    generation: int
    status: str
    text: str = Field(sa_column=_text())
    full_digest: str | None
    reason: str
    recorded_at: datetime


class BlobRow(Row, table=True):
    """Immutable content by digest: instructions, tool specs, whole results."""

    __tablename__ = "blobs"
    digest: str = Field(primary_key=True)
    content: str = Field(sa_column=_text())


class TranscriptRow(Row, table=True):
    """One message; `text` is what a reader searches, `payload` the whole message."""

    __tablename__ = "transcript"
    __table_args__ = (Index("ix_transcript_turn_id", "turn_id"),)
    namespace: str = Field(primary_key=True)
    conversation_id: str = Field(primary_key=True)
    sequence: int = Field(primary_key=True)
    version: int
    turn_id: str | None
    role: str
    kind: str
    text: str = Field(sa_column=_text())
    payload: str = Field(sa_column=_text())
    recorded_at: datetime


class PartialSegmentRow(Row, table=True):
    """Streamed output of the attempt in flight; `subject` is `step<n>` or an operation id."""

    __tablename__ = "partial_segments"
    turn_id: str = Field(primary_key=True)
    subject: str = Field(primary_key=True)
    attempt: int = Field(primary_key=True)
    position: int = Field(primary_key=True)
    channel: str
    text: str = Field(sa_column=_text())
    recorded_at: datetime


class AbortedPartialRow(Row, table=True):
    """What an attempt had streamed when it was lost; shown to people, never sent to a model."""

    __tablename__ = "aborted_partials"
    turn_id: str = Field(primary_key=True)
    subject: str = Field(primary_key=True)
    attempt: int = Field(primary_key=True)
    text: str = Field(sa_column=_text())
    thinking: str = Field(sa_column=_text())
    reason: str
    recorded_at: datetime


METADATA: MetaData = Row.metadata


def _table(row: type[Row]) -> Table:
    return cast(Table, cast(Any, row).__table__)


IDENTITY = _table(StoreIdentityRow)
CONVERSATIONS = _table(ConversationRow)
EVENTS = _table(EventRow)
TURNS = _table(TurnRow)
OWNERS = _table(TurnOwnerRow)
CHECKPOINTS = _table(CheckpointRow)
RECEIPTS = _table(ReceiptRow)
STEPS = _table(ModelStepRow)
USAGE = _table(UsageRow)
OPERATIONS = _table(OperationRow)
ATTEMPTS = _table(OperationAttemptRow)
JOURNAL = _table(JournalRow)
LATE_RESULTS = _table(LateResultRow)
BLOBS = _table(BlobRow)
TRANSCRIPT = _table(TranscriptRow)
SEGMENTS = _table(PartialSegmentRow)
ABORTED = _table(AbortedPartialRow)
