"""The append-only log: `seq` and digest chain per turn, `ordinal` per conversation.

Only `Appender` writes events, and only under the conversation's lock. It checks the chain's end
before it adds to it (DESIGN 6, health gate) and treats the same event again as done (promise P5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, func, select

from perdure.contracts.errors import LedgerCorruption, LedgerRejection
from perdure.contracts.events import LedgerEvent, chain_digest, decode_event, encode_event
from perdure.stores.clock import now
from perdure.stores.rows import insert_new, update_conversation
from perdure.stores.tables import EVENTS

_BEFORE = EVENTS.alias("before")
_EVENT = (
    select(EVENTS, _BEFORE.c.digest.label("previous"))
    .outerjoin(
        _BEFORE, and_(_BEFORE.c.turn_id == EVENTS.c.turn_id, _BEFORE.c.seq == EVENTS.c.seq - 1)
    )
    .where(EVENTS.c.event_id == bindparam("event_id"))
)
_CHAIN = select(EVENTS).where(EVENTS.c.turn_id == bindparam("turn_id")).order_by(EVENTS.c.seq)
_CHAIN_THROUGH = _CHAIN.where(EVENTS.c.seq <= bindparam("through"))
_LAST_TWO = (
    select(EVENTS.c.seq, EVENTS.c.kind, EVENTS.c.payload, EVENTS.c.digest)
    .where(EVENTS.c.turn_id == bindparam("turn_id"))
    .order_by(EVENTS.c.seq.desc())
    .limit(2)
)


@dataclass(frozen=True)
class StoredEvent:
    """An event with the places the ledger gave it."""

    seq: int
    ordinal: int
    event: LedgerEvent


class Appender:
    """Appends events of one turn in one transaction; `close` writes the conversation's counter."""

    def __init__(
        self, tx: Connection, conversation: Row[Any], turn_id: str, *, checking: bool = True
    ) -> None:
        self._tx = tx
        self._conversation = conversation
        self._turn_id = turn_id
        self.ordinal: int = conversation.last_ordinal
        if not checking:
            # A damaged counter must not keep the terminal event out.
            self.ordinal = max(self.ordinal, _last_ordinal(tx, conversation))
        self.seq, self._digest, self._sealed = _chain_end(tx, turn_id, checking=checking)

    @property
    def sealed(self) -> bool:
        """Whether the turn's terminal event is there."""
        return self._sealed

    def append(self, event: LedgerEvent) -> int:
        """Append one event and return its `seq`; an identical one that is there already is a no-op.

        Raises LedgerRejection if the turn is sealed or the id is taken by other content,
        LedgerCorruption if its place is.
        """
        payload = encode_event(event)
        if self._sealed:
            return self._same_as_stored(event.id, payload, "turn_sealed")
        seq = self.seq + 1
        digest = chain_digest(self._digest, self._turn_id, seq, payload)
        values = {
            "turn_id": self._turn_id,
            "seq": seq,
            "event_id": event.id,
            "namespace": event.namespace,
            "conversation_id": event.conversation_id,
            "ordinal": self.ordinal + 1,
            "kind": event.kind,
            "payload": payload,
            "digest": digest,
            "recorded_at": now(),
        }
        if not insert_new(self._tx, EVENTS, values):
            return self._same_as_stored(event.id, payload, "duplicate_event_id")
        self.seq, self._digest, self.ordinal = seq, digest, self.ordinal + 1
        self._sealed = event.kind == "turn_ended"
        return seq

    def close(self, **conversation: Any) -> None:
        """Write the conversation's last ordinal and any other change of its row."""
        if conversation or self.ordinal != self._conversation.last_ordinal:
            update_conversation(
                self._tx, self._conversation, last_ordinal=self.ordinal, **conversation
            )

    def _same_as_stored(self, event_id: str, payload: str, reason: str) -> int:
        row = self._tx.execute(
            select(EVENTS.c.seq, EVENTS.c.payload).where(EVENTS.c.event_id == event_id)
        ).one_or_none()
        if row is None and not self._sealed:
            raise LedgerCorruption("counters", f"the place of event {event_id} is taken")
        if row is None or row.payload != payload:
            raise LedgerRejection(reason, f"event {event_id} cannot be appended")
        return int(row.seq)


def _chain_end(tx: Connection, turn_id: str, *, checking: bool) -> tuple[int, str, bool]:
    rows = tx.execute(_LAST_TWO, {"turn_id": turn_id}).all()
    if not rows:
        return 0, "", False
    last = rows[0]
    before = rows[1] if len(rows) == 2 else None
    if checking:
        expected_seq = before.seq + 1 if before is not None else 1
        previous = before.digest if before is not None else ""
        if last.seq != expected_seq:
            raise LedgerCorruption("seq_gap", f"turn {turn_id} lacks an event before {last.seq}")
        _check_link(previous, turn_id, last)
    return int(last.seq), str(last.digest), last.kind == "turn_ended"


def _last_ordinal(tx: Connection, conversation: Row[Any]) -> int:
    where = (
        EVENTS.c.namespace == conversation.namespace,
        EVENTS.c.conversation_id == conversation.conversation_id,
    )
    return int(tx.execute(select(func.max(EVENTS.c.ordinal)).where(*where)).scalar() or 0)


def find_event(tx: Connection, event_id: str) -> StoredEvent | None:
    """One event that is acted on: its own link of the chain is checked, not the whole chain.

    Raises LedgerCorruption where the event is not what was once appended.
    """
    row = tx.execute(_EVENT, {"event_id": event_id}).one_or_none()
    if row is None:
        return None
    if row.previous is None and row.seq != 1:
        raise LedgerCorruption("seq_gap", f"turn {row.turn_id} lacks event {row.seq - 1}")
    _check_link(row.previous or "", row.turn_id, row)
    return decode_row(row)


def read_turn_events(tx: Connection, turn_id: str, through: int | None = None) -> list[StoredEvent]:
    """The turn's events in order, up to seq `through`.

    Raises LedgerCorruption for a gap, a broken chain or a payload that is no event.
    """
    if through is None:
        return decode_chain(turn_id, tx.execute(_CHAIN, {"turn_id": turn_id}).all())
    rows = tx.execute(_CHAIN_THROUGH, {"turn_id": turn_id, "through": through}).all()
    return decode_chain(turn_id, rows)


def decode_chain(turn_id: str, rows: Sequence[Row[Any]]) -> list[StoredEvent]:
    """Decode and check all rows of one turn."""
    events: list[StoredEvent] = []
    previous = ""
    for position, row in enumerate(rows, start=1):
        if row.seq != position:
            raise LedgerCorruption("seq_gap", f"turn {turn_id} lacks event {position}")
        _check_link(previous, turn_id, row)
        events.append(decode_row(row))
        previous = row.digest
    return events


def _check_link(previous: str, turn_id: str, row: Any) -> None:
    if chain_digest(previous, turn_id, row.seq, row.payload) != row.digest:
        raise LedgerCorruption("digest_mismatch", f"turn {turn_id} event {row.seq}")


def decode_row(row: Row[Any]) -> StoredEvent:
    """Decode one row and check that row and payload name the same event."""
    try:
        event = decode_event(row.payload)
    except ValueError:
        raise LedgerCorruption("payload", f"event {row.event_id} cannot be decoded") from None
    if (event.id, event.turn_id, event.kind) != (row.event_id, row.turn_id, row.kind):
        raise LedgerCorruption("row_payload_mismatch", f"event {row.event_id}")
    return StoredEvent(seq=row.seq, ordinal=row.ordinal, event=event)
