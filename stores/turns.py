"""Opening a turn and fixing the request of a model step: one transaction (DESIGN 4).

Reads the world's state only under the conversation's lock. It asks Temporal nothing: who meets a
holder or another owner gets told, and comes back with what it found out.
"""

import json
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, update

from perdure.contracts.calls import Opening, Owner, TurnRef
from perdure.contracts.canonical import content_digest
from perdure.contracts.errors import (
    Fenced,
    LedgerBehind,
    LedgerCorruption,
    LedgerRejection,
    RequestConflict,
    StepLimit,
    SummaryRequired,
)
from perdure.contracts.events import (
    ModelPrepared,
    ToolCalled,
    UserMessageRecorded,
    prepared_event_id,
    user_event_id,
)
from perdure.contracts.limits import WINDOW_MESSAGES_MAX
from perdure.contracts.turn import StopReason, TurnStatus
from perdure.stores.checkpoints import (
    TURN_KIND,
    TURN_SCHEMA_VERSION,
    Checkpoint,
    swap_checkpoint,
)
from perdure.stores.clock import now
from perdure.stores.commands import Eviction, Holder, PrepareKind, PrepareStep, StepState
from perdure.stores.event_log import Appender, decode_row, find_event, read_turn_events
from perdure.stores.finish import close_turn, stored_result
from perdure.stores.partials import abort_partial
from perdure.stores.rows import (
    find_row,
    find_turn,
    insert_new,
    insert_row,
    lock_conversation,
    update_rows,
)
from perdure.stores.tables import BLOBS, EVENTS, OWNERS, RECEIPTS, STEPS, TURNS, USAGE

_CALLS_AND_RESULTS = (
    select(EVENTS)
    .where(
        EVENTS.c.turn_id == bindparam("turn_id"),
        EVENTS.c.kind.in_(("tool_called", "tool_settled")),
    )
    .order_by(EVENTS.c.seq)
)
_ANSWERED = (
    select(func.count())
    .select_from(STEPS)
    .where(STEPS.c.turn_id == bindparam("turn_id"), STEPS.c.answered.is_(True))
)


def prepare_step(tx: Connection, command: PrepareStep) -> StepState:
    """Fix the request of a step, or say why there is nothing to call.

    Raises RequestConflict, NamespaceMismatch, SummaryRequired at opening; StepLimit, LedgerBehind,
    LedgerRejection later. What it raises has written nothing.
    """
    turn_ref, opening = command.turn, command.opening
    conversation = lock_conversation(tx, turn_ref, create=opening is not None)
    turn = find_turn(tx, turn_ref.turn_id) if conversation is not None else None
    if conversation is None or turn is None:
        if opening is None or turn_ref.store or conversation is None:
            raise LedgerBehind(f"the ledger does not know the open turn {turn_ref.turn_id}")
        return _open_new(tx, conversation, command, opening)
    refused = _refuse_known(tx, turn, command)
    if refused is not None:
        return refused
    appender = Appender(tx, conversation, turn.turn_id)
    check_not_behind(turn_ref, appender.seq)
    turn = find_turn(tx, turn_ref.turn_id)
    assert turn is not None
    state = _prepare(tx, appender, conversation, turn, command)
    appender.close()
    return state


def require_owner(tx: Connection, turn: Row[Any], ref: TurnRef) -> None:
    """Raises Fenced if a newer epoch owns the turn than the caller knows."""
    if ref.epoch < turn.epoch:
        raise Fenced(f"turn {turn.turn_id} is at epoch {turn.epoch}, this caller at {ref.epoch}")


def check_not_behind(ref: TurnRef, seq: int) -> None:
    """Raises LedgerBehind if the ledger lacks events that the workflow has seen."""
    if seq < ref.seq:
        raise LedgerBehind(
            f"the ledger has {seq} events of turn {ref.turn_id}, the workflow has seen {ref.seq}"
        )


def owner_of(tx: Connection, turn_id: str, epoch: int) -> Owner:
    """The owner of that epoch."""
    row = find_row(tx, OWNERS, turn_id=turn_id, epoch=epoch)
    assert row is not None, "every epoch has its owner"
    return Owner(
        temporal_namespace=row.temporal_namespace, workflow_id=row.workflow_id, run_id=row.run_id
    )


def fail_attempt(tx: Connection, step_key: tuple[str, int], attempt: int, error_code: str) -> int:
    """Count an error that a model reported; returns how many the step has had.

    The same attempt again changes nothing (promise P5).
    """
    turn_id, step = step_key
    counted = tx.execute(
        update(USAGE)
        .where(
            USAGE.c.turn_id == turn_id,
            USAGE.c.step == step,
            USAGE.c.attempt == attempt,
            USAGE.c.status == "started",
        )
        .values(status="failed", error_code=error_code, ended_at=now())
    ).rowcount
    where = (STEPS.c.turn_id == turn_id, STEPS.c.step == step)
    if counted:
        tx.execute(update(STEPS).where(*where).values(errors=STEPS.c.errors + 1))
        abort_partial(tx, turn_id, f"step{step}", attempt, "model_error")
    return int(tx.execute(select(STEPS.c.errors).where(*where)).scalar_one())


def pending_calls(tx: Connection, turn_id: str, step: int) -> tuple[ToolCalled, ...]:
    """The calls of a step that have no result yet, in call order."""
    rows = tx.execute(_CALLS_AND_RESULTS, {"turn_id": turn_id}).all()
    events = [decode_row(row).event for row in rows]
    settled = {event.operation_id for event in events if event.kind == "tool_settled"}
    return tuple(
        event
        for event in events
        if isinstance(event, ToolCalled)
        and event.step == step
        and event.operation_id not in settled
    )


def _open_new(
    tx: Connection, conversation: Row[Any], command: PrepareStep, opening: Opening
) -> StepState:
    assert command.owner is not None
    key = command.turn
    if conversation.active_turn_id is not None:
        held = _held_by(tx, conversation, command.eviction)
        if held is not None:
            return held
        freed = lock_conversation(tx, key)
        assert freed is not None
        conversation = freed
    if conversation.last_sequence > WINDOW_MESSAGES_MAX:
        raise SummaryRequired(
            f"conversation {key.conversation_id} has {conversation.last_sequence} messages; "
            f"at most {WINDOW_MESSAGES_MAX} fit into a window"
        )
    insert_turn(tx, command.turn, opening, conversation.version, epoch=1)
    add_owner(tx, key.turn_id, 1, command.owner, "opened")
    payload = {"phase": "model", "step": 1, "expected_version": conversation.version}
    checkpoint = Checkpoint(
        checkpoint_id=key.turn_id,
        kind=TURN_KIND,
        schema_version=TURN_SCHEMA_VERSION,
        payload=payload,
    )
    swap_checkpoint(tx, checkpoint, None)
    appender = Appender(tx, conversation, key.turn_id)
    appender.append(user_event(command.turn, opening, conversation.version))
    turn = find_turn(tx, key.turn_id)
    assert turn is not None
    state = _prepare(tx, appender, conversation, turn, command)
    appender.close(active_turn_id=key.turn_id)
    return state


def insert_turn(
    tx: Connection, ref: TurnRef, opening: Opening | None, version: int, *, epoch: int
) -> None:
    """Insert the turn's row and the request's receipt."""
    digest = opening.request_digest if opening is not None else ""
    moment = now()
    values: dict[str, Any] = {
        "turn_id": ref.turn_id,
        "namespace": ref.namespace,
        "conversation_id": ref.conversation_id,
        "request_id": ref.request_id,
        "agent": opening.agent if opening is not None else "",
        "status": TurnStatus.OPEN.value,
        "request_digest": digest,
        "epoch": epoch,
        "expected_version": version,
        "conversation_version": version,
        "opened_at": moment,
    }
    counters = dict.fromkeys(("steps", "input_tokens", "output_tokens", "cached_tokens"), 0)
    empty = dict.fromkeys(("stop_reason", "detail", "answer", "ended_at"))
    insert_row(tx, TURNS, {**values, **counters, **empty, "answer_is_output": False})
    receipt = {
        "namespace": ref.namespace,
        "conversation_id": ref.conversation_id,
        "request_id": ref.request_id,
        "request_digest": digest,
        "disposition": "turn",
        "turn_id": ref.turn_id,
        "recorded_at": moment,
    }
    insert_new(tx, RECEIPTS, receipt)


def user_event(ref: TurnRef, opening: Opening, version: int) -> UserMessageRecorded:
    """The first event of a turn."""
    return UserMessageRecorded(
        id=user_event_id(ref.turn_id),
        namespace=ref.namespace,
        conversation_id=ref.conversation_id,
        turn_id=ref.turn_id,
        agent=opening.agent,
        request_id=ref.request_id,
        request_digest=opening.request_digest,
        message=opening.message,
        tools=opening.tools,
        limits=opening.limits,
        parameters=opening.parameters,
        expected_version=version,
    )


def add_owner(tx: Connection, turn_id: str, epoch: int, owner: Owner, reason: str) -> None:
    """Record who acts for the turn from this epoch on."""
    values = {"turn_id": turn_id, "epoch": epoch, "reason": reason, "taken_at": now()}
    insert_row(tx, OWNERS, {**values, **owner.model_dump()})


def _held_by(tx: Connection, conversation: Row[Any], eviction: Eviction | None) -> StepState | None:
    holder = find_turn(tx, conversation.active_turn_id)
    assert holder is not None, "a claim names a turn that is not there"
    if (
        eviction is not None
        and eviction.turn_id == holder.turn_id
        and eviction.epoch == holder.epoch
    ):
        close_turn(
            tx,
            conversation,
            holder,
            status=TurnStatus.FAILED,
            stop_reason=StopReason.TURN_LOST,
            detail="its workflow was closed without an outcome in the ledger",
        )
        return None
    owner = owner_of(tx, holder.turn_id, holder.epoch)
    return StepState(
        kind=PrepareKind.BUSY,
        holder=Holder(turn_id=holder.turn_id, epoch=holder.epoch, owner=owner),
    )


def _refuse_known(tx: Connection, turn: Row[Any], command: PrepareStep) -> StepState | None:
    opening = command.opening
    if (
        opening is not None
        and turn.request_digest
        and opening.request_digest != turn.request_digest
    ):
        raise RequestConflict(
            f"request {turn.request_id} was used before with other content; use a new request id"
        )
    if turn.status != TurnStatus.OPEN:
        return StepState(kind=PrepareKind.OVER, result=stored_result(turn))
    if opening is None:
        if command.turn.epoch < turn.epoch:
            return StepState(kind=PrepareKind.FOLLOW)
        return None
    assert command.owner is not None
    if owner_of(tx, turn.turn_id, turn.epoch) == command.owner:
        return None
    if opening.take_over != turn.epoch:
        return StepState(kind=PrepareKind.FOLLOW, epoch=turn.epoch)
    update_rows(tx, TURNS, {"turn_id": turn.turn_id}, epoch=turn.epoch + 1)
    add_owner(tx, turn.turn_id, turn.epoch + 1, command.owner, "taken_over")
    return None


def _prepare(
    tx: Connection,
    appender: Appender,
    conversation: Row[Any],
    turn: Row[Any],
    command: PrepareStep,
) -> StepState:
    step = command.step
    opened = user_message_of(tx, turn.turn_id)
    base: dict[str, Any] = {"agent": turn.agent, "tools": opened.tools, "epoch": turn.epoch}
    step_key = {"turn_id": turn.turn_id, "step": step}
    row = find_row(tx, STEPS, **step_key)
    if row is not None and row.answered:
        pending = pending_calls(tx, turn.turn_id, step)
        return StepState(kind=PrepareKind.COMMITTED, seq=appender.seq, pending=pending, **base)
    if row is None:
        _check_order(tx, turn, opened, step)
        attempt, prepared = 1, _prepared_fact(opened, appender, conversation, command)
        _keep_blobs(tx, command)
        appender.append(prepared)
        values = {"attempt": attempt, "token": command.token, "prepared": 1, "errors": 0}
        insert_row(tx, STEPS, {**step_key, **values, "answered": False})
    elif row.token == command.token:
        prepared = _stored_prepared(tx, turn.turn_id, step, row.prepared)
        return StepState(
            kind=PrepareKind.READY,
            seq=appender.seq,
            attempt=row.attempt,
            prepared=prepared,
            **base,
        )
    else:
        attempt = row.attempt + 1
        prepared = _stored_prepared(tx, turn.turn_id, step, row.prepared)
        abort_partial(tx, turn.turn_id, f"step{step}", row.attempt, "superseded")
        update_rows(tx, STEPS, step_key, attempt=attempt, token=command.token)
    _start_usage(tx, turn.turn_id, step, attempt, prepared.model, command.worker)
    return StepState(
        kind=PrepareKind.READY, seq=appender.seq, attempt=attempt, prepared=prepared, **base
    )


def user_message_of(tx: Connection, turn_id: str) -> UserMessageRecorded:
    """The event that opened the turn."""
    stored = find_event(tx, user_event_id(turn_id))
    if stored is None or not isinstance(stored.event, UserMessageRecorded):
        # A rejection says that the store is healthy: look before it is said.
        read_turn_events(tx, turn_id)
        raise LedgerRejection("not_opened", f"turn {turn_id} does not begin with its message")
    return stored.event


def _check_order(tx: Connection, turn: Row[Any], opened: UserMessageRecorded, step: int) -> None:
    answered = tx.execute(_ANSWERED, {"turn_id": turn.turn_id}).scalar_one()
    if step != answered + 1:
        raise LedgerBehind(f"turn {turn.turn_id} has {answered} answers, this is step {step}")
    if step > 1 and pending_calls(tx, turn.turn_id, step - 1):
        raise LedgerRejection(
            "calls_open", f"step {step - 1} of turn {turn.turn_id} has open calls"
        )
    if step > opened.limits.model_steps_max:
        raise StepLimit(f"turn {turn.turn_id} used its {step - 1} model steps")


def _prepared_fact(
    opened: UserMessageRecorded, appender: Appender, conversation: Row[Any], command: PrepareStep
) -> ModelPrepared:
    last = conversation.last_sequence
    return ModelPrepared(
        id=prepared_event_id(opened.turn_id, command.step, 1),
        namespace=opened.namespace,
        conversation_id=opened.conversation_id,
        turn_id=opened.turn_id,
        step=command.step,
        prepared=1,
        model=command.model,
        parameters={**json.loads(command.parameters_json), **opened.parameters},
        instructions_digest=content_digest(command.instructions),
        tools_digest=content_digest(command.tools_json),
        output_digest=None if command.output_json is None else content_digest(command.output_json),
        window_from=1 if last else 0,
        window_through=last,
        events_through=appender.seq,
    )


def _stored_prepared(tx: Connection, turn_id: str, step: int, prepared: int) -> ModelPrepared:
    stored = find_event(tx, prepared_event_id(turn_id, step, prepared))
    if stored is None or not isinstance(stored.event, ModelPrepared):
        raise LedgerCorruption("event_missing", f"turn {turn_id} lacks the request of step {step}")
    return stored.event


def _keep_blobs(tx: Connection, command: PrepareStep) -> None:
    for content in (command.instructions, command.tools_json, command.output_json):
        if content is not None:
            keep_blob(tx, content)


def keep_blob(tx: Connection, content: str) -> str:
    """Store content once, by its digest; returns the digest."""
    digest = content_digest(content)
    insert_new(tx, BLOBS, {"digest": digest, "content": content})
    return digest


def _start_usage(
    tx: Connection, turn_id: str, step: int, attempt: int, model: str, worker: str
) -> None:
    if attempt > 1:
        tx.execute(
            update(USAGE)
            .where(USAGE.c.turn_id == turn_id, USAGE.c.step == step, USAGE.c.status == "started")
            .values(status="lost", ended_at=now())
        )
    values: dict[str, Any] = {
        "turn_id": turn_id,
        "step": step,
        "attempt": attempt,
        "status": "started",
        "model": model,
        "worker": worker,
        "started_at": now(),
    }
    counters = dict.fromkeys(("input_tokens", "output_tokens", "cached_tokens"), 0)
    insert_row(tx, USAGE, {**values, **counters, "error_code": None, "ended_at": None})
