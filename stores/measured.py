"""What measuring asks of the ledger, one row by its key. It decides nothing and writes nothing."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from perdure.contracts.model import Usage
from perdure.contracts.turn import TurnStatus
from perdure.stores.rows import find_row, find_turn
from perdure.stores.tables import ATTEMPTS


@dataclass(frozen=True)
class EndedTurn:
    """A turn that has its outcome, without its text."""

    turn_id: str
    namespace: str
    conversation_id: str
    agent: str
    status: TurnStatus
    stop_reason: str
    steps: int
    usage: Usage
    opened_at: datetime
    ended_at: datetime


def find_ended_turn(tx: Connection, turn_id: str) -> EndedTurn | None:
    """The turn, None while it is open or where the ledger does not know it."""
    row = find_turn(tx, turn_id)
    if row is None or row.ended_at is None:
        return None
    usage = Usage(
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        cached_tokens=row.cached_tokens,
    )
    return EndedTurn(
        turn_id=turn_id,
        namespace=row.namespace,
        conversation_id=row.conversation_id,
        agent=row.agent,
        status=TurnStatus(row.status),
        stop_reason=row.stop_reason or "",
        steps=row.steps,
        usage=usage,
        opened_at=row.opened_at,
        ended_at=row.ended_at,
    )


def attempt_outcome(tx: Connection, operation_id: str, generation: int) -> str | None:
    """How an execution ended: `won`, `late`, `error`, or None where it has no outcome."""
    row = find_row(tx, ATTEMPTS, operation_id=operation_id, generation=generation)
    return None if row is None else row.outcome
