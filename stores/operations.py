"""The gate in front of every effect: T1, T2 and what happens to a lost generation (DESIGN 5).

It decides on the call, dispatch and outcome *events* and on the attempts, never on projections.
Attempts are never dropped. The guarantee of promise P2 is the uniqueness of (operation, generation)
together with the rule which generation may follow which.
"""

from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, update

from perdure.contracts.calls import CallTool, TurnRef
from perdure.contracts.canonical import content_digest
from perdure.contracts.errors import Fenced, LedgerBehind, LedgerCorruption, LedgerRejection
from perdure.contracts.events import (
    Decision,
    Observation,
    ReconcileReported,
    RecoveryDecided,
    ToolCalled,
    ToolDispatched,
    called_event_id,
    dispatched_event_id,
    settled_event_id,
)
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.safety import LostEffect, ReplaySafety, after_lost_effect, stricter
from perdure.contracts.tools import ResultReason, ToolOutcome
from perdure.contracts.turn import TurnStatus
from perdure.stores.clock import database_now_ms, now
from perdure.stores.closing import interrupted_outcome, record_settled
from perdure.stores.commands import (
    CloseCall,
    DispatchCall,
    DispatchKind,
    DispatchReply,
    ReportReconcile,
    SettleCall,
)
from perdure.stores.event_log import Appender, find_event, read_turn_events
from perdure.stores.finish import sealed_result, stored_result
from perdure.stores.ledger import lock_turn
from perdure.stores.partials import read_partial
from perdure.stores.rows import find_row, insert_new, insert_row, update_rows
from perdure.stores.tables import (
    ATTEMPTS,
    BLOBS,
    EVENTS,
    JOURNAL,
    LATE_RESULTS,
    OPERATIONS,
)
from perdure.stores.turns import check_not_behind, require_owner

_LATEST_ATTEMPT = (
    select(ATTEMPTS)
    .where(ATTEMPTS.c.operation_id == bindparam("operation_id"))
    .order_by(ATTEMPTS.c.generation.desc())
    .limit(1)
)
_SEQ_OF_EVENT = select(EVENTS.c.seq).where(EVENTS.c.event_id == bindparam("event_id"))


def dispatch_call(tx: Connection, command: DispatchCall) -> DispatchReply:
    """T1: allow one execution, or say why not. The same token again is the same execution.

    Raises LedgerBehind or LedgerRejection if the ledger lacks the call.
    """
    conversation, turn, called, refused = _open_call(tx, command.turn, command.step, command.index)
    if refused is not None:
        return refused
    assert called is not None
    appender = Appender(tx, conversation, turn.turn_id)
    if appender.sealed:
        # The turn's row is a projection: whatever it says, the terminal event is the last.
        return DispatchReply(kind=DispatchKind.OVER, result=sealed_result(tx, turn))
    check_not_behind(command.turn, appender.seq)
    latest = _latest_attempt(tx, called.operation_id)
    if latest is None:
        if command.only_looking:
            raise LedgerBehind(f"the ledger lacks every attempt of {called.operation_id}")
        return _dispatch_first(tx, appender, turn, called, command)
    if latest.token == command.token:
        errors = reported_errors(tx, called.operation_id)
        safety = ReplaySafety(latest.safety)
        return _mine(appender.seq, called, safety, latest.generation, errors)
    held = _held(tx, appender.seq, called, latest, command)
    if command.rerun_of == latest.generation and held.rerun_allowed:
        generation = latest.generation + 1
        _insert_attempt(tx, called.operation_id, generation, held.safety, command)
        tx.execute(
            update(OPERATIONS)
            .where(OPERATIONS.c.operation_id == called.operation_id)
            .values(generation=generation, version=OPERATIONS.c.version + 1)
        )
        return _mine(appender.seq, called, held.safety, generation, errors=held.errors)
    return held


def settle_call(tx: Connection, command: SettleCall) -> int:
    """T2: commit the outcome of an execution. The first outcome wins, also one of an old epoch.

    A later one, or one without a dispatch, goes to the late results. Returns the turn's `seq`.
    """
    try:
        conversation, turn = lock_turn(tx, command.turn)
    except LedgerBehind:
        # A restored backup lacks the turn; what really happened is still worth keeping.
        _keep_late(tx, command, command.turn.turn_id, "no_dispatch")
        return 0
    attempt = find_row(tx, ATTEMPTS, operation_id=command.operation_id, token=command.token)
    if attempt is not None and attempt.outcome in ("won", "late"):
        return _last_seq(tx, turn.turn_id)
    called = _find_called(tx, command.operation_id)
    settled = _is_settled(tx, command.operation_id)
    if attempt is None or called is None or settled or turn.status != TurnStatus.OPEN:
        reason = "no_dispatch" if attempt is None else "already_settled"
        _keep_late(tx, command, turn.turn_id, reason)
        if attempt is not None:
            _mark_attempt(tx, command.token, "late")
        return _last_seq(tx, turn.turn_id)
    appender = Appender(tx, conversation, turn.turn_id)
    seq = record_settled(tx, appender, called, command.outcome, command.generation)
    appender.close()
    _mark_attempt(tx, command.token, "won")
    return seq


def close_call(tx: Connection, command: CloseCall) -> DispatchReply:
    """Close a call that has no outcome of its own, if that is still true; see `CloseCall`.

    `held` means that it could not be closed: the holder lives, or a newer generation runs.
    """
    conversation, turn, called, refused = _open_call(tx, command.turn, command.step, command.index)
    if refused is not None:
        return refused
    assert called is not None
    appender = Appender(tx, conversation, turn.turn_id)
    latest = _latest_attempt(tx, called.operation_id)
    outcome = command.outcome
    if latest is not None:
        lost = _is_lost(tx, latest, command.holder_lost_ms)
        if command.generation != latest.generation or not lost:
            return DispatchReply(
                kind=DispatchKind.HELD,
                seq=appender.seq,
                operation_id=called.operation_id,
                generation=latest.generation,
                called=called,
                safety=ReplaySafety(latest.safety),
                holder_is_lost=lost,
            )
        reason = outcome.reason or ResultReason.WORKER_LOST
        progress = read_partial(tx, turn.turn_id, called.operation_id)
        outcome = interrupted_outcome(reason, progress)
    seq = record_settled(tx, appender, called, outcome, command.generation or 0)
    appender.close()
    return DispatchReply(kind=DispatchKind.SETTLED, seq=seq, operation_id=called.operation_id)


def report_reconcile(tx: Connection, command: ReportReconcile) -> DispatchReply:
    """Record what a reconcile function said and decide: completed, rerun or parked (seed 3.3).

    EXECUTED and UNKNOWN settle the call in the same transaction; NOT_EXECUTED allows exactly one
    further generation. The same report again changes nothing.
    """
    conversation, turn, called, refused = _open_call(tx, command.turn, command.step, command.index)
    if refused is not None:
        return refused
    assert called is not None
    appender = Appender(tx, conversation, turn.turn_id)
    latest = _latest_attempt(tx, called.operation_id)
    if latest is None or latest.generation != command.generation:
        return _held_reply(appender.seq, called, latest)
    if _decision_of(tx, called.operation_id, command.generation) is not None:
        return _held_reply(appender.seq, called, latest)
    decision = _append_recovery(appender, called, command)
    if decision is Decision.COMPLETED:
        assert command.outcome is not None
        record_settled(tx, appender, called, command.outcome, command.generation)
    elif decision is Decision.PARKED:
        progress = read_partial(tx, turn.turn_id, called.operation_id)
        outcome = interrupted_outcome(ResultReason.UNKNOWN_OUTCOME, progress)
        record_settled(tx, appender, called, outcome, command.generation)
    appender.close()
    kind = DispatchKind.HELD if decision is Decision.RERUN else DispatchKind.SETTLED
    return DispatchReply(
        kind=kind,
        seq=appender.seq,
        operation_id=called.operation_id,
        generation=command.generation,
        called=called,
    )


def renew_attempts(tx: Connection, tokens: list[str]) -> None:
    """Show that the holders live, by the database's clock."""
    tx.execute(
        update(ATTEMPTS)
        .where(ATTEMPTS.c.token.in_(tokens), ATTEMPTS.c.stopped.is_(False))
        .values(alive_at_ms=database_now_ms(tx))
    )


def stop_attempt(tx: Connection, token: str, outcome: str | None = None) -> None:
    """The execution has ended without an outcome: `error` is counted, None is a stopped worker."""
    values: dict[str, Any] = {"stopped": True}
    if outcome is not None:
        values["outcome"] = outcome
    tx.execute(
        update(ATTEMPTS)
        .where(ATTEMPTS.c.token == token, ATTEMPTS.c.outcome.is_(None))
        .values(**values)
    )


def reported_errors(tx: Connection, operation_id: str) -> int:
    """How many executions of the call reported an error."""
    return int(
        tx.execute(
            select(func.count())
            .select_from(ATTEMPTS)
            .where(ATTEMPTS.c.operation_id == operation_id, ATTEMPTS.c.outcome == "error")
        ).scalar_one()
    )


def read_call(tx: Connection, command: CallTool) -> ToolCalled | None:
    """The call event, if it is there."""
    turn_id = command.turn.turn_id
    return _find_called(tx, derive_operation_id(turn_id, command.step, command.index))


def _open_call(
    tx: Connection, ref: TurnRef, step: int, index: int
) -> tuple[Row[Any], Row[Any], ToolCalled | None, DispatchReply | None]:
    conversation, turn = lock_turn(tx, ref)
    operation_id = derive_operation_id(turn.turn_id, step, index)
    if turn.status != TurnStatus.OPEN:
        result = stored_result(turn)
        return conversation, turn, None, DispatchReply(kind=DispatchKind.OVER, result=result)
    if _is_settled(tx, operation_id):
        seq = _last_seq(tx, turn.turn_id)
        reply = DispatchReply(kind=DispatchKind.SETTLED, seq=seq, operation_id=operation_id)
        return conversation, turn, None, reply
    try:
        require_owner(tx, turn, ref)
    except Fenced:
        return conversation, turn, None, DispatchReply(kind=DispatchKind.FENCED)
    called = _find_called(tx, operation_id)
    if called is None:
        if ref.seq > _last_seq(tx, turn.turn_id):
            raise LedgerBehind(f"the ledger lacks call {index} of step {step} of {turn.turn_id}")
        # A rejection says that the store is healthy: look before it is said.
        read_turn_events(tx, turn.turn_id)
        raise LedgerRejection("orphan_dispatch", f"step {step} has no call {index}")
    return conversation, turn, called, None


def _dispatch_first(
    tx: Connection, appender: Appender, turn: Row[Any], called: ToolCalled, command: DispatchCall
) -> DispatchReply:
    safety = stricter(called.safety, command.safety)
    operation_id = called.operation_id
    event_id = dispatched_event_id(operation_id)
    seen = appender.seq
    dispatched = appender.append(
        ToolDispatched(
            id=event_id,
            namespace=called.namespace,
            conversation_id=called.conversation_id,
            turn_id=called.turn_id,
            step=called.step,
            index=called.index,
            operation_id=operation_id,
            tool=called.tool,
            arguments_digest=called.arguments_digest,
            safety=safety,
        )
    )
    if dispatched <= seen:
        raise LedgerCorruption("attempt_missing", f"{operation_id} was dispatched by nobody")
    moment = now()
    values = {
        "operation_id": operation_id,
        "turn_id": called.turn_id,
        "step": called.step,
        "call_index": called.index,
        "namespace": called.namespace,
        "conversation_id": called.conversation_id,
        "agent": turn.agent,
        "tool": called.tool,
        "provider_call_id": called.provider_call_id,
        "arguments_digest": called.arguments_digest,
        "safety": safety.value,
        "state": "prepared",
        "status": None,
        "generation": 1,
        "call_event_id": called_event_id(operation_id),
        "dispatch_event_id": event_id,
        "outcome_event_id": None,
        "version": 1,
        "prepared_at": moment,
        "settled_at": None,
    }
    insert_row(tx, OPERATIONS, values)
    journal = {
        "journal_id": f"{operation_id}_prepared",
        "operation_id": operation_id,
        "state": "prepared",
        "event_id": event_id,
        "recorded_at": moment,
    }
    insert_row(tx, JOURNAL, journal)
    _insert_attempt(tx, operation_id, 1, safety, command)
    appender.close()
    return _mine(appender.seq, called, safety, 1)


def _insert_attempt(
    tx: Connection, operation_id: str, generation: int, safety: ReplaySafety, command: DispatchCall
) -> None:
    values = {
        "operation_id": operation_id,
        "generation": generation,
        "token": command.token,
        "safety": safety.value,
        "worker": command.worker,
        "activity": command.activity,
        "activity_attempt": command.activity_attempt,
        "started_at": now(),
        "alive_at_ms": database_now_ms(tx),
        "stopped": False,
        "outcome": None,
    }
    insert_row(tx, ATTEMPTS, values)


def _mine(
    seq: int, called: ToolCalled, safety: ReplaySafety, generation: int, errors: int = 0
) -> DispatchReply:
    return DispatchReply(
        kind=DispatchKind.MINE,
        seq=seq,
        operation_id=called.operation_id,
        generation=generation,
        called=called,
        safety=safety,
        errors=errors,
    )


def _held(
    tx: Connection, seq: int, called: ToolCalled, latest: Row[Any], command: DispatchCall
) -> DispatchReply:
    safety = stricter(ReplaySafety(latest.safety), command.safety)
    lost = _is_lost(tx, latest, command.holder_lost_ms)
    earlier = (
        latest.activity == command.activity and latest.activity_attempt < command.activity_attempt
    )
    match after_lost_effect(safety):
        case LostEffect.RERUN:
            allowed = lost or earlier
        case LostEffect.RECONCILE:
            decision = _decision_of(tx, called.operation_id, latest.generation)
            allowed = decision is Decision.RERUN
        case LostEffect.INTERRUPT:
            allowed = False
    return DispatchReply(
        kind=DispatchKind.HELD,
        seq=seq,
        operation_id=called.operation_id,
        generation=latest.generation,
        called=called,
        safety=safety,
        holder_is_lost=lost,
        holder_is_earlier_attempt=earlier,
        rerun_allowed=allowed,
        errors=reported_errors(tx, called.operation_id),
    )


def _held_reply(seq: int, called: ToolCalled, latest: Row[Any] | None) -> DispatchReply:
    return DispatchReply(
        kind=DispatchKind.HELD,
        seq=seq,
        operation_id=called.operation_id,
        generation=latest.generation if latest is not None else 0,
        called=called,
    )


def _is_lost(tx: Connection, latest: Row[Any], holder_lost_ms: int) -> bool:
    return bool(latest.stopped) or database_now_ms(tx) - latest.alive_at_ms > holder_lost_ms


def _latest_attempt(tx: Connection, operation_id: str) -> Row[Any] | None:
    return tx.execute(_LATEST_ATTEMPT, {"operation_id": operation_id}).one_or_none()


def _find_called(tx: Connection, operation_id: str) -> ToolCalled | None:
    stored = find_event(tx, called_event_id(operation_id))
    if stored is None:
        return None
    assert isinstance(stored.event, ToolCalled)
    return stored.event


def _is_settled(tx: Connection, operation_id: str) -> bool:
    parameters = {"event_id": settled_event_id(operation_id)}
    return tx.execute(_SEQ_OF_EVENT, parameters).first() is not None


def _last_seq(tx: Connection, turn_id: str) -> int:
    query = select(func.max(EVENTS.c.seq)).where(EVENTS.c.turn_id == turn_id)
    return int(tx.execute(query).scalar() or 0)


def _mark_attempt(tx: Connection, token: str, outcome: str) -> None:
    update_rows(tx, ATTEMPTS, {"token": token}, outcome=outcome, stopped=True)


def _keep_late(tx: Connection, command: SettleCall, turn_id: str, reason: str) -> None:
    outcome: ToolOutcome = command.outcome
    full_digest = None
    if outcome.full is not None:
        full_digest = content_digest(outcome.full)
        insert_new(tx, BLOBS, {"digest": full_digest, "content": outcome.full})
    values = {
        "operation_id": command.operation_id,
        "token": command.token,
        "turn_id": turn_id,
        "generation": command.generation,
        "status": outcome.status.value,
        "text": outcome.text,
        "full_digest": full_digest,
        "reason": reason,
        "recorded_at": now(),
    }
    insert_new(tx, LATE_RESULTS, values)


def _decision_of(tx: Connection, operation_id: str, generation: int) -> Decision | None:
    stored = find_event(tx, f"{operation_id}_decision_{generation}")
    if stored is None:
        return None
    assert isinstance(stored.event, RecoveryDecided)
    return stored.event.decision


def _append_recovery(appender: Appender, called: ToolCalled, command: ReportReconcile) -> Decision:
    decision = {
        Observation.EXECUTED: Decision.COMPLETED,
        Observation.NOT_EXECUTED: Decision.RERUN,
        Observation.UNKNOWN: Decision.PARKED,
    }[command.observation]
    where: dict[str, Any] = {
        "namespace": called.namespace,
        "conversation_id": called.conversation_id,
        "turn_id": called.turn_id,
        "operation_id": called.operation_id,
        "generation": command.generation,
    }
    operation_id = called.operation_id
    appender.append(
        ReconcileReported(
            id=f"{operation_id}_reconcile_{command.generation}",
            observation=command.observation,
            **where,
        )
    )
    appender.append(
        RecoveryDecided(
            id=f"{operation_id}_decision_{command.generation}", decision=decision, **where
        )
    )
    return decision
