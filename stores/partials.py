"""Streamed output, durable before anyone sees it and never part of the ledger (promise P8).

Segments belong to one attempt; an older attempt cannot append once a newer one has begun. What an
attempt leaves behind is kept in a row of its own, and the final text replaces its segments.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from perdure.contracts.canonical import sanitise_text
from perdure.contracts.errors import Superseded
from perdure.stores.clock import now
from perdure.stores.rows import delete_rows, insert_new
from perdure.stores.tables import ABORTED, ATTEMPTS, EVENTS, SEGMENTS, STEPS

TEXT, THINKING, OUTPUT = "text", "thinking", "output"

_LOCK_STEP = (
    select(STEPS.c.attempt, STEPS.c.answered)
    .where(STEPS.c.turn_id == bindparam("turn_id"), STEPS.c.step == bindparam("step"))
    .with_for_update()
)
_SUPERSEDE = (
    update(STEPS)
    .where(STEPS.c.turn_id == bindparam("key_turn_id"), STEPS.c.answered.is_(False))
    .values(attempt=STEPS.c.attempt + 1)
)
_LEFT_OVER = (
    select(SEGMENTS.c.subject, SEGMENTS.c.attempt)
    .where(SEGMENTS.c.turn_id == bindparam("turn_id"))
    .distinct()
)


def append_step_segments(
    tx: Connection,
    turn_id: str,
    step: int,
    attempt: int,
    position: int,
    pieces: Sequence[tuple[str, str]],
) -> int:
    """Append (channel, text) pieces of a model step's attempt, one segment per run of a channel.

    `position` is the first segment's; returns the next one. The same append again changes nothing.
    Raises Superseded if a newer attempt has begun or the step is answered.
    """
    row = tx.execute(_LOCK_STEP, {"turn_id": turn_id, "step": step}).one_or_none()
    if row is None or row.attempt != attempt or row.answered:
        raise Superseded(f"attempt {attempt} of step {step} of turn {turn_id} is not the newest")
    return _append(tx, turn_id, f"step{step}", attempt, position, pieces)


def append_tool_output(
    tx: Connection, turn_id: str, operation_id: str, generation: int, position: int, text: str
) -> int:
    """Append committed progress of one generation of a call; returns the next position.

    Raises Superseded if a newer generation was allowed or the call has its result.
    """
    newest = tx.execute(
        select(func.max(ATTEMPTS.c.generation)).where(ATTEMPTS.c.operation_id == operation_id)
    ).scalar()
    settled = tx.execute(
        select(EVENTS.c.seq).where(EVENTS.c.event_id == f"{operation_id}_outcome")
    ).first()
    if newest != generation or settled is not None:
        raise Superseded(f"generation {generation} of {operation_id} is not the newest")
    return _append(tx, turn_id, operation_id, generation, position, [(OUTPUT, text)])


def read_partial(tx: Connection, turn_id: str, subject: str, attempt: int | None = None) -> str:
    """The text that an attempt (the newest, if None) has streamed so far, without thinking."""
    return "".join(
        row.text
        for row in read_segments(tx, turn_id, subject, attempt)
        if row.channel in (TEXT, OUTPUT)
    )


def read_segments(
    tx: Connection, turn_id: str, subject: str, attempt: int | None = None
) -> Sequence[Any]:
    """The segments of an attempt (the newest, if None), in order."""
    where = (SEGMENTS.c.turn_id == turn_id, SEGMENTS.c.subject == subject)
    if attempt is None:
        attempt = tx.execute(select(func.max(SEGMENTS.c.attempt)).where(*where)).scalar()
    return tx.execute(
        select(SEGMENTS).where(*where, SEGMENTS.c.attempt == attempt).order_by(SEGMENTS.c.position)
    ).all()


def abort_partial(tx: Connection, turn_id: str, subject: str, attempt: int, reason: str) -> None:
    """Move what an attempt has streamed into a row of its own; nothing streamed leaves no row."""
    rows = read_segments(tx, turn_id, subject, attempt)
    if not rows:
        return
    text = "".join(row.text for row in rows if row.channel != THINKING)
    thinking = "".join(row.text for row in rows if row.channel == THINKING)
    values = {
        "turn_id": turn_id,
        "subject": subject,
        "attempt": attempt,
        "text": text,
        "thinking": thinking,
        "reason": reason,
        "recorded_at": now(),
    }
    insert_new(tx, ABORTED, values)
    delete_rows(tx, SEGMENTS, turn_id=turn_id, subject=subject, attempt=attempt)


def drop_partial(tx: Connection, turn_id: str, subject: str) -> None:
    """Remove the segments of a subject: the final text has replaced them."""
    delete_rows(tx, SEGMENTS, turn_id=turn_id, subject=subject)


def abort_all_partials(tx: Connection, turn_id: str, reason: str) -> None:
    """Close every leftover partial of a turn that ends, and its streams to whoever still writes."""
    # As a newer attempt would: segments lock this row and not the conversation.
    tx.execute(_SUPERSEDE, {"key_turn_id": turn_id})
    rows = tx.execute(_LEFT_OVER, {"turn_id": turn_id}).all()
    for row in rows:
        abort_partial(tx, turn_id, row.subject, row.attempt, reason)


def _append(
    tx: Connection,
    turn_id: str,
    subject: str,
    attempt: int,
    position: int,
    pieces: Sequence[tuple[str, str]],
) -> int:
    moment = now()
    for channel, text in _runs(pieces):
        values = {
            "turn_id": turn_id,
            "subject": subject,
            "attempt": attempt,
            "position": position,
            "channel": channel,
            "text": sanitise_text(text),
            "recorded_at": moment,
        }
        insert_new(tx, SEGMENTS, values)
        position += 1
    return position


def _runs(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    runs: list[tuple[str, list[str]]] = []
    for channel, text in pieces:
        if not runs or runs[-1][0] != channel:
            runs.append((channel, []))
        runs[-1][1].append(text)
    return [(channel, "".join(texts)) for channel, texts in runs]
