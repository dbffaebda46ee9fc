"""How a settled call went, for an operator's eyes: read only where it went no ordinary way."""

from typing import NamedTuple

from sqlalchemy import Connection, func, select

from perdure.contracts.events import ToolSettled, settled_event_id
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.stores.event_log import find_event
from perdure.stores.tables import ATTEMPTS, LATE_RESULTS


class CallFacts(NamedTuple):
    """How a settled call went."""

    status: ResultStatus
    reason: ResultReason | None
    generation: int
    late: bool


def call_facts(tx: Connection, operation_id: str) -> CallFacts | None:
    """How a call went, None if it has no result."""
    stored = find_event(tx, settled_event_id(operation_id))
    if stored is None:
        return None
    event = stored.event
    assert isinstance(event, ToolSettled)
    of_call = ATTEMPTS.c.operation_id == operation_id
    generation = tx.execute(select(func.max(ATTEMPTS.c.generation)).where(of_call)).scalar()
    late = select(func.count()).where(LATE_RESULTS.c.operation_id == operation_id)
    return CallFacts(
        status=event.status,
        reason=event.reason,
        generation=int(generation or 0),
        late=bool(tx.execute(late).scalar_one()),
    )
