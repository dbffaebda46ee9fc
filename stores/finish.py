"""Ending a turn: transcript append, checkpoint and terminal event are one transaction (P1, P6).

The final commit of an answer and `end` are compare-and-swap on one checkpoint row: the loser gets
the winner's outcome. A damaged turn still gets its terminal event (promise P10).
"""

import json
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, func, select
from sqlalchemy.exc import IntegrityError

from perdure.contracts.canonical import sanitise_text
from perdure.contracts.conversation import messages_of_turn
from perdure.contracts.errors import CheckpointError, LedgerCorruption
from perdure.contracts.events import (
    LedgerEvent,
    ModelAnswered,
    ToolCalled,
    ToolDispatched,
    ToolSettled,
    TurnEnded,
    ended_event_id,
)
from perdure.contracts.limits import ANSWER_IN_RESULT_BYTES_MAX, ERROR_CHARS_MAX, TOKENS_COUNTED_MAX
from perdure.contracts.messages import Message, MessageKind, TextPart, user_message
from perdure.contracts.model import FinishReason, Usage
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.contracts.turn import StopReason, TurnResult, TurnStatus, cut_text
from perdure.stores.checkpoints import advance_turn_checkpoint
from perdure.stores.clock import now
from perdure.stores.closing import closing_outcome, open_operation_ids, record_settled
from perdure.stores.event_log import Appender, find_event, read_turn_events
from perdure.stores.partials import abort_all_partials
from perdure.stores.rows import find_turn, update_rows
from perdure.stores.tables import TURNS, USAGE
from perdure.stores.transcript import write_messages

_USED = select(
    func.coalesce(func.sum(USAGE.c.input_tokens), 0).label("input"),
    func.coalesce(func.sum(USAGE.c.output_tokens), 0).label("output"),
    func.coalesce(func.sum(USAGE.c.cached_tokens), 0).label("cached"),
).where(USAGE.c.turn_id == bindparam("turn_id"))


class Answer(NamedTuple):
    """The answer of a completed turn; `is_output`: its text is the validated JSON."""

    step: int
    text: str
    is_output: bool


def stored_result(turn: Row[Any]) -> TurnResult:
    """The recorded outcome of an ended turn."""
    answer, cut = (None, False)
    if turn.answer is not None:
        answer, cut = cut_text(turn.answer, ANSWER_IN_RESULT_BYTES_MAX)
    return TurnResult(
        turn_id=turn.turn_id,
        status=TurnStatus(turn.status),
        stop_reason=turn.stop_reason or "",
        answer=answer,
        answer_cut=cut,
        output=json.loads(answer) if answer and turn.answer_is_output and not cut else None,
        usage=Usage(
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
            cached_tokens=turn.cached_tokens,
        ),
        conversation_version=turn.conversation_version,
        request_digest=turn.request_digest,
    )


def sealed_result(tx: Connection, turn: Row[Any]) -> TurnResult:
    """The outcome of a turn whose terminal event is there, though its row does not say so."""
    stored = find_event(tx, ended_event_id(turn.turn_id))
    if stored is None or not isinstance(stored.event, TurnEnded):
        raise LedgerCorruption("event_missing", f"turn {turn.turn_id} lacks its terminal event")
    ended = stored.event
    return TurnResult(
        turn_id=turn.turn_id,
        status=ended.status,
        stop_reason=ended.stop_reason,
        usage=ended.usage,
        conversation_version=ended.conversation_version,
        request_digest=turn.request_digest,
    )


def complete_turn(
    tx: Connection,
    appender: Appender,
    conversation: Row[Any],
    turn: Row[Any],
    step: int,
    *,
    output_json: str | None = None,
) -> TurnResult:
    """Commit the turn with the answer of `step`: its terminal event closes the transaction.

    A validated answer (`output_json`) is the turn's answer in place of the text it was read from.
    """
    events = [stored.event for stored in read_turn_events(tx, turn.turn_id)]
    answer = next(
        event for event in events if isinstance(event, ModelAnswered) and event.step == step
    )
    text = "".join(part.text for part in answer.parts if isinstance(part, TextPart))
    return _write_end(
        tx,
        appender,
        conversation,
        turn,
        messages=messages_of_turn(events),
        status=TurnStatus.COMPLETED,
        stop_reason=(
            StopReason.LENGTH
            if answer.finish_reason is FinishReason.LENGTH and output_json is None
            else StopReason.ANSWERED
        ),
        answer=Answer(step, text if output_json is None else output_json, output_json is not None),
    )


def close_turn(
    tx: Connection,
    conversation: Row[Any],
    turn: Row[Any],
    *,
    status: TurnStatus,
    stop_reason: str,
    detail: str,
) -> TurnResult:
    """End an open turn failed or cancelled: every open call is closed, a marker tells the next."""
    ending: dict[str, Any] = {
        "status": status,
        "stop_reason": stop_reason,
        "detail": detail[:ERROR_CHARS_MAX],
    }
    savepoint = tx.begin_nested()
    try:
        result = _end_whole(tx, conversation, turn, **ending)
    except (LedgerCorruption, CheckpointError, IntegrityError):
        # Wherever the damage shows: the terminal event is written all the same.
        savepoint.rollback()
        return _end_damaged(tx, conversation, turn, **ending)
    savepoint.commit()
    return result


def _end_whole(
    tx: Connection,
    conversation: Row[Any],
    turn: Row[Any],
    *,
    status: TurnStatus,
    stop_reason: str,
    detail: str,
) -> TurnResult:
    events = [stored.event for stored in read_turn_events(tx, turn.turn_id)]
    appender = Appender(tx, conversation, turn.turn_id)
    _close_calls(tx, appender, events, status)
    events = [stored.event for stored in read_turn_events(tx, turn.turn_id)]
    messages = messages_of_turn(events)
    messages.append(user_message(_marker(events, status, stop_reason), MessageKind.MARKER))
    return _write_end(
        tx,
        appender,
        conversation,
        turn,
        messages=messages,
        status=status,
        stop_reason=stop_reason,
        detail=detail,
    )


def end_unopened(
    tx: Connection, appender: Appender, turn: Row[Any], status: TurnStatus, stop_reason: str
) -> TurnResult:
    """Write the terminal event of a turn that never opened: a tombstone, nothing in the transcript.

    A late opening then finds it ended.
    """
    _append_end(appender, turn, status, stop_reason, "", None, Usage(), turn.conversation_version)
    appender.close()
    return _update_turn(tx, turn, status, stop_reason, "", None, Usage(), turn.conversation_version)


def turn_usage(tx: Connection, turn_id: str) -> Usage:
    """Tokens of all attempts, also of those that were lost or failed."""
    row = tx.execute(_USED, {"turn_id": turn_id}).one()
    return Usage(
        input_tokens=min(int(row.input), TOKENS_COUNTED_MAX),
        output_tokens=min(int(row.output), TOKENS_COUNTED_MAX),
        cached_tokens=min(int(row.cached), TOKENS_COUNTED_MAX),
    )


def _close_calls(
    tx: Connection, appender: Appender, events: list[LedgerEvent], status: TurnStatus
) -> None:
    settled = {event.operation_id for event in events if isinstance(event, ToolSettled)}
    dispatched = {event.operation_id for event in events if isinstance(event, ToolDispatched)}
    reason = (
        ResultReason.TURN_CANCELLED if status is TurnStatus.CANCELLED else ResultReason.TURN_FAILED
    )
    for event in events:
        if isinstance(event, ToolCalled) and event.operation_id not in settled:
            outcome = closing_outcome(
                tx, event, dispatched=event.operation_id in dispatched, reason=reason
            )
            record_settled(tx, appender, event, outcome)


def _marker(events: list[LedgerEvent], status: TurnStatus, stop_reason: str) -> str:
    lines = [f"[The turn before this ended {status.value} ({stop_reason}) without an answer."]
    lines += [
        f"Call {event.tool}: {_effect_of(event)}."
        for event in events
        if isinstance(event, ToolSettled)
    ]
    return " ".join(lines) + "]"


def _effect_of(event: ToolSettled) -> str:
    match event.status:
        case ResultStatus.OK:
            return "took effect"
        case ResultStatus.ERROR:
            return "reported an error"
        case ResultStatus.INTERRUPTED:
            return "was interrupted and may or may not have taken effect"
        case ResultStatus.NOT_EXECUTED | ResultStatus.REFUSED:
            return "was not executed"


def _write_end(
    tx: Connection,
    appender: Appender,
    conversation: Row[Any],
    turn: Row[Any],
    *,
    messages: list[Message],
    status: TurnStatus,
    stop_reason: str,
    detail: str = "",
    answer: Answer | None = None,
) -> TurnResult:
    version, last_sequence = write_messages(tx, conversation, messages, turn.turn_id)
    usage = turn_usage(tx, turn.turn_id)
    step = answer.step if answer is not None else None
    _append_end(appender, turn, status, stop_reason, detail, step, usage, version)
    appender.close(version=version, last_sequence=last_sequence, active_turn_id=None)
    phase = {"phase": status.value, "stop_reason": stop_reason, "version": version}
    advance_turn_checkpoint(tx, turn.turn_id, phase)
    abort_all_partials(tx, turn.turn_id, status.value)
    return _update_turn(tx, turn, status, stop_reason, detail, answer, usage, version)


def _end_damaged(
    tx: Connection,
    conversation: Row[Any],
    turn: Row[Any],
    *,
    status: TurnStatus,
    stop_reason: str,
    detail: str,
) -> TurnResult:
    appender = Appender(tx, conversation, turn.turn_id, checking=False)
    unclosed = open_operation_ids(tx, turn.turn_id)
    usage = turn_usage(tx, turn.turn_id)
    version = conversation.version
    _append_end(
        appender, turn, status, stop_reason, detail, None, usage, version, unclosed=unclosed
    )
    appender.close(active_turn_id=None)
    abort_all_partials(tx, turn.turn_id, "damaged")
    return _update_turn(tx, turn, status, stop_reason, detail, None, usage, version)


def _append_end(
    appender: Appender,
    turn: Row[Any],
    status: TurnStatus,
    stop_reason: str,
    detail: str,
    answer_step: int | None,
    usage: Usage,
    version: int,
    *,
    unclosed: tuple[str, ...] = (),
) -> None:
    appender.append(
        TurnEnded(
            id=ended_event_id(turn.turn_id),
            namespace=turn.namespace,
            conversation_id=turn.conversation_id,
            turn_id=turn.turn_id,
            status=status,
            stop_reason=stop_reason,
            detail=detail,
            answer_step=answer_step,
            usage=usage,
            conversation_version=version,
            unclosed=unclosed,
        )
    )


def _update_turn(
    tx: Connection,
    turn: Row[Any],
    status: TurnStatus,
    stop_reason: str,
    detail: str,
    answer: Answer | None,
    usage: Usage,
    version: int,
) -> TurnResult:
    update_rows(
        tx,
        TURNS,
        {"turn_id": turn.turn_id},
        status=status.value,
        stop_reason=stop_reason,
        detail=detail,
        answer=None if answer is None else sanitise_text(answer.text),
        answer_is_output=answer is not None and answer.is_output,
        conversation_version=version,
        ended_at=now(),
        **usage.model_dump(),
    )
    row = find_turn(tx, turn.turn_id)
    assert row is not None
    return stored_result(row)
