"""Writing the one result of a call, and what a call is told that has no outcome of its own (P4).

"It did not run" is written only here and only where no dispatch exists; the gate refuses the call
from then on.
"""

from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from perdure.contracts.canonical import content_digest
from perdure.contracts.events import ToolCalled, ToolSettled, settled_event_id
from perdure.contracts.tools import ResultReason, ResultStatus, ToolOutcome, head_for_model
from perdure.stores.clock import now
from perdure.stores.event_log import Appender
from perdure.stores.partials import drop_partial, read_partial
from perdure.stores.rows import insert_new
from perdure.stores.tables import BLOBS, EVENTS, JOURNAL, OPERATIONS

_SETTLE = (
    update(OPERATIONS)
    .where(
        OPERATIONS.c.operation_id == bindparam("key_operation_id"),
        OPERATIONS.c.outcome_event_id.is_(None),
    )
    .values(state="outcome_committed", version=OPERATIONS.c.version + 1)
)
_SAID: dict[ResultReason, str] = {
    ResultReason.WORKER_LOST: "The worker that ran this call was lost.",
    ResultReason.TIMED_OUT: "The call did not end within its time.",
    ResultReason.UNKNOWN_OUTCOME: "Nobody can tell what became of this call.",
    ResultReason.TOOL_UNAVAILABLE: "No worker can run this tool at the moment.",
    ResultReason.TURN_CANCELLED: "The turn was cancelled.",
    ResultReason.TURN_FAILED: "The turn failed.",
}


def interrupted_outcome(reason: ResultReason, progress: str) -> ToolOutcome:
    """The result of a call that was dispatched and whose outcome is unknown, with its progress."""
    text = f"interrupted: {_SAID.get(reason, '')} It may or may not have taken effect."
    if progress:
        text += f" Progress before the interruption:\n{head_for_model(progress)}"
    return ToolOutcome(status=ResultStatus.INTERRUPTED, reason=reason, text=text)


def not_executed_outcome(reason: ResultReason) -> ToolOutcome:
    """The result of a call that was never dispatched and never will be."""
    return ToolOutcome(
        status=ResultStatus.NOT_EXECUTED,
        reason=reason,
        text=f"not executed: {_SAID.get(reason, '')} This call was never started.",
    )


def closing_outcome(
    tx: Connection, called: ToolCalled, *, dispatched: bool, reason: ResultReason
) -> ToolOutcome:
    """What an open call is closed with when its turn ends."""
    if dispatched:
        progress = read_partial(tx, called.turn_id, called.operation_id)
        return interrupted_outcome(reason, progress)
    return not_executed_outcome(reason)


def record_settled(
    tx: Connection,
    appender: Appender,
    called: ToolCalled,
    outcome: ToolOutcome,
    generation: int = 0,
) -> int:
    """Append the result event and bring operation and journal along; returns the event's seq."""
    full_digest = _keep_full(tx, outcome)
    event_id = settled_event_id(called.operation_id)
    seq = appender.append(
        ToolSettled(
            id=event_id,
            namespace=called.namespace,
            conversation_id=called.conversation_id,
            turn_id=called.turn_id,
            step=called.step,
            index=called.index,
            operation_id=called.operation_id,
            tool=called.tool,
            status=outcome.status,
            reason=outcome.reason,
            text=outcome.text,
            flags=outcome.flags,
            full_digest=full_digest,
            generation=generation,
            structured=outcome.structured,
        )
    )
    values = {
        "key_operation_id": called.operation_id,
        "status": outcome.status.value,
        "outcome_event_id": event_id,
        "settled_at": now(),
    }
    if tx.execute(_SETTLE, values).rowcount:
        _journal_outcome(tx, called.operation_id, event_id)
        drop_partial(tx, called.turn_id, called.operation_id)
    return seq


def open_operation_ids(tx: Connection, turn_id: str) -> tuple[str, ...]:
    """Operations without a result, by their row columns only: payloads may be damaged."""
    rows = tx.execute(
        select(EVENTS.c.event_id, EVENTS.c.kind).where(
            EVENTS.c.turn_id == turn_id, EVENTS.c.kind.in_(("tool_called", "tool_settled"))
        )
    ).all()
    called = [row.event_id.removesuffix("_call") for row in rows if row.kind == "tool_called"]
    settled = {row.event_id.removesuffix("_outcome") for row in rows if row.kind == "tool_settled"}
    return tuple(operation for operation in called if operation not in settled)


def _journal_outcome(tx: Connection, operation_id: str, event_id: str) -> None:
    values: dict[str, Any] = {
        "journal_id": f"{operation_id}_outcome",
        "operation_id": operation_id,
        "state": "outcome_committed",
        "event_id": event_id,
        "recorded_at": now(),
    }
    insert_new(tx, JOURNAL, values)


def _keep_full(tx: Connection, outcome: ToolOutcome) -> str | None:
    if outcome.full is None:
        return None
    digest = content_digest(outcome.full)
    insert_new(tx, BLOBS, {"digest": digest, "content": outcome.full})
    return digest
