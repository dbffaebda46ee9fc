"""What must be true of a turn however its workers crashed and whoever was first (DESIGN 1, 5)."""

from collections import Counter

from harness.crash_run import Case, Seen
from harness.turns import assert_sendable
from perdure.contracts.events import (
    Decision,
    Observation,
    ReconcileReported,
    RecoveryDecided,
    ToolCalled,
    ToolDispatched,
    ToolSettled,
    TurnEnded,
)
from perdure.contracts.turn import TurnStatus


def assert_promises(case: Case, seen: Seen) -> None:
    """What holds of every case, whoever was first."""
    assert seen.result.status is TurnStatus.COMPLETED
    assert seen.details.turn.status is TurnStatus.COMPLETED
    assert seen.result.answer == seen.details.turn.answer
    assert (seen.conversation.version, seen.conversation.active_turn_id) == (1, None)
    assert [event for event in seen.events if isinstance(event, TurnEnded)] == seen.events[-1:]
    called = [event.operation_id for event in seen.events if isinstance(event, ToolCalled)]
    settled = [event.operation_id for event in seen.events if isinstance(event, ToolSettled)]
    assert settled == called
    assert_sendable(seen.transcript)
    assert not seen.partials
    assert seen.victim_exit in (None, 0), "a worker that may stop stops by itself"
    # Each generation that the gate allowed was executed at most once, under one operation id.
    executed = Counter((effect["op"], effect["gen"]) for effect in seen.effects)
    assert set(executed.values()) <= {1}
    operation = seen.operation
    if operation is None:
        assert not seen.effects
        return
    assert {effect["op"] for effect in seen.effects} <= {operation.operation_id}
    (result,) = [event for event in seen.events if isinstance(event, ToolSettled)]
    (told,) = [part for message in seen.transcript for part in message.results]
    assert (told.text, told.is_error) == (result.text, result.status != "ok")
    assert result.text in str(seen.result.answer)
    dispatched = [event for event in seen.events if isinstance(event, ToolDispatched)]
    assert len(dispatched) == min(len(operation.generations), 1)
    if case.tool == "send":
        assert len(seen.effects) <= 1
        # The model was told what took effect, or that nobody knows; what comes later stays beside.
        late = len(seen.details.late_results)
        assert late == 0 if result.status == "ok" else late <= len(seen.effects)
        assert result.status != "not_executed" or not seen.effects
    if case.tool == "ship":
        assert_reconciled(seen)


def assert_reconciled(seen: Seen) -> None:
    """A further generation ran only after NOT_EXECUTED was said of the one before it."""
    assert seen.operation is not None
    said = {
        event.generation: event.observation
        for event in seen.events
        if isinstance(event, ReconcileReported)
    }
    decided = {
        event.generation: event.decision
        for event in seen.events
        if isinstance(event, RecoveryDecided)
    }
    executed = {effect["gen"] for effect in seen.effects}
    for later in seen.operation.generations[1:]:
        before = later.generation - 1
        assert said[before] is Observation.NOT_EXECUTED
        assert decided[before] is Decision.RERUN
        assert before not in executed
