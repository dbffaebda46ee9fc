"""Reading the ledger: for the CLI, for `client.follow`, for tests. Writes nothing."""

from typing import Any

from sqlalchemy import Connection, Row, RowMapping, select

from perdure.contracts.canonical import canonical_json
from perdure.contracts.conversation import ConversationState, TranscriptEntry
from perdure.contracts.events import ToolCalled, ToolSettled
from perdure.contracts.ids import derive_turn_id
from perdure.contracts.limits import WINDOW_MESSAGES_MAX
from perdure.contracts.model import Usage
from perdure.contracts.turn import TurnStatus
from perdure.contracts.views import (
    GenerationView,
    LateResultView,
    ModelAttemptView,
    OperationView,
    OwnerView,
    PartialView,
    RecordedEvent,
    TurnDetails,
    TurnView,
)
from perdure.stores.engine import Store
from perdure.stores.event_log import decode_row, read_turn_events
from perdure.stores.ledger import read_blob
from perdure.stores.partials import THINKING, read_segments
from perdure.stores.rows import find_turn
from perdure.stores.tables import (
    ABORTED,
    ATTEMPTS,
    EVENTS,
    LATE_RESULTS,
    OPERATIONS,
    OWNERS,
    SEGMENTS,
    USAGE,
)
from perdure.stores.transcript import list_transcript, read_conversation


class Reader:
    """A ledger opened for reading; each call sees one state of it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def turn(self, turn_id: str) -> TurnView | None:
        """The turn, None if the ledger does not know it."""
        return self._store.read(_read_turn, turn_id)

    def find_turn(self, namespace: str, conversation_id: str, request_id: str) -> TurnView | None:
        """The turn of a request."""
        return self.turn(derive_turn_id(namespace, conversation_id, request_id))

    def details(self, turn_id: str) -> TurnDetails | None:
        """Everything that happened in a turn."""
        return self._store.read(_read_details, turn_id)

    def conversation(self, namespace: str, conversation_id: str) -> ConversationState:
        """Raises ConversationMissing, NamespaceMismatch."""
        return self._store.read(read_conversation, namespace, conversation_id)

    def transcript(
        self, namespace: str, conversation_id: str, after: int = 0, limit: int = WINDOW_MESSAGES_MAX
    ) -> list[TranscriptEntry]:
        """Messages with a sequence over `after`, at most `limit` (1..4096)."""
        return self._store.read(list_transcript, namespace, conversation_id, after, limit)

    def events(
        self, namespace: str, conversation_id: str, after: int = 0, limit: int = 500
    ) -> list[RecordedEvent]:
        """Events of a conversation with an ordinal over `after`, in commit order."""
        return self._store.read(_read_events, namespace, conversation_id, after, limit)

    def turn_events(self, turn_id: str) -> list[RecordedEvent]:
        """All events of a turn, with its chain checked."""
        stored = self._store.read(read_turn_events, turn_id)
        return [RecordedEvent(ordinal=x.ordinal, seq=x.seq, event=x.event) for x in stored]

    def partials(self, turn_id: str) -> list[PartialView]:
        """What the attempts in flight have streamed so far."""
        return self._store.read(_read_partials, turn_id)

    def blob(self, digest: str) -> str:
        """Content by digest: a whole result, instructions, tool specs."""
        return self._store.read(read_blob, digest)


def _read_turn(tx: Connection, turn_id: str) -> TurnView | None:
    row = find_turn(tx, turn_id)
    return _turn_view(row) if row is not None else None


def _turn_view(row: Row[Any]) -> TurnView:
    return TurnView(
        turn_id=row.turn_id,
        namespace=row.namespace,
        conversation_id=row.conversation_id,
        request_id=row.request_id,
        agent=row.agent,
        status=TurnStatus(row.status),
        stop_reason=row.stop_reason,
        detail=row.detail,
        request_digest=row.request_digest,
        answer=row.answer,
        epoch=row.epoch,
        steps=row.steps,
        usage=_usage(row),
        conversation_version=row.conversation_version,
        opened_at=row.opened_at,
        ended_at=row.ended_at,
    )


def _usage(row: Row[Any]) -> Usage:
    return Usage(
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        cached_tokens=row.cached_tokens,
    )


def _read_events(
    tx: Connection, namespace: str, conversation_id: str, after: int, limit: int
) -> list[RecordedEvent]:
    rows = tx.execute(
        select(EVENTS)
        .where(
            EVENTS.c.namespace == namespace,
            EVENTS.c.conversation_id == conversation_id,
            EVENTS.c.ordinal > after,
        )
        .order_by(EVENTS.c.ordinal)
        .limit(limit)
    ).all()
    stored = [decode_row(row) for row in rows]
    return [RecordedEvent(ordinal=x.ordinal, seq=x.seq, event=x.event) for x in stored]


def _read_partials(tx: Connection, turn_id: str) -> list[PartialView]:
    subjects = tx.execute(
        select(SEGMENTS.c.subject).where(SEGMENTS.c.turn_id == turn_id).distinct()
    ).scalars()
    views: list[PartialView] = []
    for subject in subjects:
        rows = read_segments(tx, turn_id, subject)
        views.append(
            PartialView(
                subject=subject,
                attempt=rows[0].attempt,
                text="".join(row.text for row in rows if row.channel != THINKING),
                thinking="".join(row.text for row in rows if row.channel == THINKING),
            )
        )
    return views


def _read_details(tx: Connection, turn_id: str) -> TurnDetails | None:
    turn = _read_turn(tx, turn_id)
    if turn is None:
        return None
    owners = _rows(tx, OWNERS, OWNERS.c.turn_id == turn_id, OWNERS.c.epoch)
    usage = _rows(tx, USAGE, USAGE.c.turn_id == turn_id, USAGE.c.step, USAGE.c.attempt)
    late = _rows(tx, LATE_RESULTS, LATE_RESULTS.c.turn_id == turn_id, LATE_RESULTS.c.recorded_at)
    aborted = _rows(tx, ABORTED, ABORTED.c.turn_id == turn_id, ABORTED.c.recorded_at)
    return TurnDetails(
        turn=turn,
        owners=tuple(OwnerView.model_validate(dict(row)) for row in owners),
        model_attempts=tuple(
            ModelAttemptView.model_validate({**row, "usage": Usage.model_validate(dict(row))})
            for row in usage
        ),
        operations=_operations(tx, turn_id),
        late_results=tuple(LateResultView.model_validate(dict(row)) for row in late),
        aborted_partials=tuple(PartialView.model_validate(dict(row)) for row in aborted),
    )


def _rows(tx: Connection, table: Any, where: Any, *order: Any) -> list[RowMapping]:
    return list(tx.execute(select(table).where(where).order_by(*order)).mappings())


def _operations(tx: Connection, turn_id: str) -> tuple[OperationView, ...]:
    events = [stored.event for stored in read_turn_events(tx, turn_id)]
    settled = {event.operation_id: event for event in events if isinstance(event, ToolSettled)}
    stored_safety = {
        row["operation_id"]: row["safety"]
        for row in _rows(tx, OPERATIONS, OPERATIONS.c.turn_id == turn_id, OPERATIONS.c.step)
    }
    views: list[OperationView] = []
    for called in events:
        if isinstance(called, ToolCalled):
            safety = stored_safety.get(called.operation_id, called.safety.value)
            result = settled.get(called.operation_id)
            views.append(_operation(tx, called, result, safety))
    return tuple(views)


def _operation(
    tx: Connection, called: ToolCalled, result: ToolSettled | None, safety: str
) -> OperationView:
    attempts = _rows(
        tx, ATTEMPTS, ATTEMPTS.c.operation_id == called.operation_id, ATTEMPTS.c.generation
    )
    return OperationView(
        operation_id=called.operation_id,
        step=called.step,
        index=called.index,
        tool=called.tool,
        safety=safety,
        arguments=canonical_json(called.arguments),
        status=result.status.value if result is not None else None,
        reason=result.reason.value if result is not None and result.reason is not None else None,
        text=result.text if result is not None else None,
        flags=result.flags if result is not None else (),
        full_digest=result.full_digest if result is not None else None,
        generations=tuple(GenerationView.model_validate(dict(row)) for row in attempts),
    )
