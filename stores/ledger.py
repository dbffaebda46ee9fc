"""The commands that commit: a model's answer, a model's error, the end of a turn.

Together with `turns.prepare_step` and the gate in `operations` these are all that writes events.
"""

from typing import Any

from sqlalchemy import Connection, Row, bindparam, update

from perdure.contracts.calls import TurnRef
from perdure.contracts.conversation import messages_of_turn
from perdure.contracts.errors import LedgerBehind, RequestConflict, Superseded, WrongStore
from perdure.contracts.events import (
    ModelPrepared,
    OutputRefused,
    UserMessageRecorded,
    refused_event_id,
)
from perdure.contracts.limits import OUTPUT_REPAIRS_MAX, TOKENS_COUNTED_MAX
from perdure.contracts.turn import StopReason, TurnResult, TurnStatus
from perdure.stores.checkpoints import advance_turn_checkpoint
from perdure.stores.clock import now
from perdure.stores.closing import record_settled
from perdure.stores.commands import (
    CommitAnswer,
    FailAttempt,
    FinishTurn,
    PrepareKind,
    StepState,
    TurnContext,
)
from perdure.stores.event_log import Appender, read_turn_events
from perdure.stores.finish import close_turn, complete_turn, end_unopened, stored_result
from perdure.stores.partials import drop_partial
from perdure.stores.rows import find_row, find_turn, lock_conversation, update_rows
from perdure.stores.tables import BLOBS, STEPS, TURNS, USAGE
from perdure.stores.transcript import read_window
from perdure.stores.turns import (
    check_not_behind,
    fail_attempt,
    insert_turn,
    owner_of,
    pending_calls,
    require_owner,
    user_event,
    user_message_of,
)

_COUNT = update(USAGE).where(
    USAGE.c.turn_id == bindparam("key_turn_id"),
    USAGE.c.step == bindparam("key_step"),
    USAGE.c.attempt == bindparam("key_attempt"),
    USAGE.c.status.in_(("started", "lost")),
)


def check_store(store_id: str, ref: TurnRef) -> None:
    """Raises WrongStore if the turn was opened in another ledger (DESIGN 4)."""
    if ref.store and ref.store != store_id:
        raise WrongStore(
            f"turn {ref.turn_id} lives in ledger {ref.store}, this worker uses {store_id}; "
            "point PERDURE_STORE_URL to the same database on every worker"
        )


def load_context(tx: Connection, turn_id: str, prepared: ModelPrepared) -> TurnContext:
    """Everything a prepared request is made of; the same for every attempt."""
    events = read_turn_events(tx, turn_id, through=prepared.events_through)
    window = read_window(
        tx,
        prepared.namespace,
        prepared.conversation_id,
        prepared.window_from,
        prepared.window_through,
    )
    messages = [entry.message for entry in window]
    messages.extend(messages_of_turn(stored.event for stored in events))
    return TurnContext(
        instructions=read_blob(tx, prepared.instructions_digest),
        tools_json=read_blob(tx, prepared.tools_digest),
        output_json=(
            None if prepared.output_digest is None else read_blob(tx, prepared.output_digest)
        ),
        messages=tuple(messages),
    )


def find_opened(tx: Connection, turn_id: str) -> UserMessageRecorded | None:
    """The event that opened the turn, None if the ledger does not know it."""
    return user_message_of(tx, turn_id) if find_turn(tx, turn_id) is not None else None


def read_blob(tx: Connection, digest: str) -> str:
    """Content by digest. Raises LedgerBehind if it is gone."""
    row = find_row(tx, BLOBS, digest=digest)
    if row is None:
        raise LedgerBehind(f"the ledger lacks content {digest}")
    return str(row.content)


def commit_answer(tx: Connection, command: CommitAnswer) -> StepState:
    """Commit one attempt's answer; without calls, commit the turn.

    An answer that is there already wins, whoever wrote it (promise P7). Raises Superseded if a
    newer attempt has begun, Fenced for an old epoch.
    """
    ref, answered = command.turn, command.answered
    conversation, turn = lock_turn(tx, ref)
    if turn.status != TurnStatus.OPEN:
        _record_usage(tx, command, "superseded")
        return StepState(kind=PrepareKind.OVER, result=stored_result(turn))
    require_owner(tx, turn, ref)
    appender = Appender(tx, conversation, turn.turn_id)
    check_not_behind(ref, appender.seq)
    step_key = {"turn_id": turn.turn_id, "step": answered.step}
    step = find_row(tx, STEPS, **step_key)
    if step is None:
        raise LedgerBehind(f"the ledger lacks step {answered.step} of turn {turn.turn_id}")
    base: dict[str, Any] = {"agent": turn.agent, "epoch": turn.epoch}
    base |= {"attempt": step.attempt, "errors": step.errors}
    if step.answered:
        # Of an attempt that comes second the cost is kept; the one that won is not counted again.
        _record_usage(tx, command, "superseded")
        pending = pending_calls(tx, turn.turn_id, answered.step)
        return StepState(kind=PrepareKind.COMMITTED, seq=appender.seq, pending=pending, **base)
    if step.attempt != answered.attempt:
        raise Superseded(f"attempt {answered.attempt} of step {answered.step} is not the newest")
    appender.append(answered)
    for planned in command.calls:
        appender.append(planned.called)
        if planned.refusal is not None:
            record_settled(tx, appender, planned.called, planned.refusal)
    _record_usage(tx, command, "committed")
    update_rows(tx, STEPS, step_key, answered=True)
    update_rows(tx, TURNS, {"turn_id": turn.turn_id}, steps=answered.step)
    drop_partial(tx, turn.turn_id, f"step{answered.step}")
    if not command.calls and command.output_problem is None:
        result = complete_turn(
            tx, appender, conversation, turn, answered.step, output_json=command.output_json
        )
        return StepState(kind=PrepareKind.OVER, result=result, **base)
    if not command.calls:
        failed = _refuse_output(tx, appender, command)
        if failed is not None:
            return StepState(kind=PrepareKind.OVER, result=failed, **base)
    advance_turn_checkpoint(tx, turn.turn_id, {"phase": "tools", "step": answered.step})
    appender.close()
    pending = tuple(planned.called for planned in command.calls if planned.refusal is None)
    return StepState(kind=PrepareKind.COMMITTED, seq=appender.seq, pending=pending, **base)


def _refuse_output(tx: Connection, appender: Appender, command: CommitAnswer) -> TurnResult | None:
    ref, step = command.turn, command.answered.step
    assert command.output_problem is not None
    events = [stored.event for stored in read_turn_events(tx, ref.turn_id)]
    if sum(isinstance(event, OutputRefused) for event in events) < OUTPUT_REPAIRS_MAX:
        appender.append(
            OutputRefused(
                id=refused_event_id(ref.turn_id, step),
                namespace=ref.namespace,
                conversation_id=ref.conversation_id,
                turn_id=ref.turn_id,
                step=step,
                text=command.output_problem,
            )
        )
        return None
    appender.close()
    conversation, turn = lock_turn(tx, ref)
    return close_turn(
        tx,
        conversation,
        turn,
        status=TurnStatus.FAILED,
        stop_reason=StopReason.OUTPUT_INVALID,
        detail=f"no answer fitted the agent's output type after {OUTPUT_REPAIRS_MAX} repairs",
    )


def record_superseded(tx: Connection, command: CommitAnswer) -> None:
    """Keep only the cost of an answer that came too late."""
    _record_usage(tx, command, "superseded")


def fail_model_attempt(tx: Connection, command: FailAttempt) -> int:
    """Count an error the model reported; returns how many this step has had."""
    return fail_attempt(
        tx, (command.turn.turn_id, command.step), command.attempt, command.error_code
    )


def end_turn(tx: Connection, command: FinishTurn) -> TurnResult | None:
    """End a turn failed or cancelled, or return the outcome that came first.

    None where another owner or a newer epoch acts: the caller becomes a follower. An unknown turn
    gets a tombstone, so that a late opening finds it ended.
    """
    ref = command.turn
    # A tombstone creates the conversation, because ordinals are counted there.
    conversation = lock_conversation(tx, ref, create=True)
    assert conversation is not None
    turn = find_turn(tx, ref.turn_id)
    if turn is None:
        return _entomb(tx, conversation, command)
    digest = command.opening.request_digest if command.opening is not None else ""
    if digest and turn.request_digest and digest != turn.request_digest:
        raise RequestConflict(
            f"request {turn.request_id} was used before with other content; use a new request id"
        )
    if turn.status != TurnStatus.OPEN:
        return stored_result(turn)
    if not _is_owner(tx, turn, command):
        return None
    return close_turn(
        tx,
        conversation,
        turn,
        status=command.status,
        stop_reason=command.stop_reason,
        detail=command.detail,
    )


def lock_turn(tx: Connection, ref: TurnRef) -> tuple[Row[Any], Row[Any]]:
    """Conversation (locked) and turn. Raises LedgerBehind if the ledger knows neither."""
    conversation = lock_conversation(tx, ref)
    turn = find_turn(tx, ref.turn_id) if conversation is not None else None
    if conversation is None or turn is None:
        raise LedgerBehind(f"the ledger does not know the open turn {ref.turn_id}")
    return conversation, turn


def latest_owner(tx: Connection, ref: TurnRef) -> tuple[int, Any] | None:
    """Epoch and owner of an open turn; None if it has ended or is unknown."""
    turn = find_turn(tx, ref.turn_id)
    if turn is None or turn.status != TurnStatus.OPEN:
        return None
    return turn.epoch, owner_of(tx, turn.turn_id, turn.epoch)


def read_result(tx: Connection, turn_id: str) -> TurnResult | None:
    """The outcome of an ended turn."""
    turn = find_turn(tx, turn_id)
    if turn is None or turn.status == TurnStatus.OPEN:
        return None
    return stored_result(turn)


def turn_state(tx: Connection, turn_id: str) -> tuple[str | None, TurnResult | None]:
    """Status (None if unknown) and, once ended, the outcome."""
    turn = find_turn(tx, turn_id)
    if turn is None:
        return None, None
    return turn.status, stored_result(turn) if turn.status != TurnStatus.OPEN else None


def _is_owner(tx: Connection, turn: Row[Any], command: FinishTurn) -> bool:
    if command.turn.epoch:
        return bool(command.turn.epoch >= turn.epoch)
    if command.opening is not None and command.opening.take_over == turn.epoch:
        # Its owner is gone and the successor could not take it over: it may still end it.
        return True
    return owner_of(tx, turn.turn_id, turn.epoch) == command.owner


def _entomb(tx: Connection, conversation: Row[Any], command: FinishTurn) -> TurnResult:
    ref = command.turn
    insert_turn(tx, ref, command.opening, conversation.version, epoch=max(ref.epoch, 1))
    turn = find_turn(tx, ref.turn_id)
    assert turn is not None
    appender = Appender(tx, conversation, ref.turn_id)
    if command.opening is not None:
        appender.append(user_event(ref, command.opening, conversation.version))
    return end_unopened(tx, appender, turn, command.status, command.stop_reason)


def _record_usage(tx: Connection, command: CommitAnswer, status: str) -> None:
    answered = command.answered
    tokens: dict[str, int] = answered.usage.model_dump()
    counts = {name: min(count, TOKENS_COUNTED_MAX) for name, count in tokens.items()}
    key = {
        "key_turn_id": command.turn.turn_id,
        "key_step": answered.step,
        "key_attempt": answered.attempt,
    }
    tx.execute(_COUNT, {**key, **counts, "status": status, "ended_at": now()})
