"""`follow_turn` and `end`: waiting for another owner's outcome, and ending one's own turn."""

import asyncio

from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest

from perdure.activities.engine import Engine, current_owner
from perdure.activities.owners import OwnerState, owner_state
from perdure.activities.telemetry import Recovery
from perdure.contracts.calls import EndReply, EndTurn, FollowReply, FollowTurn
from perdure.contracts.messages import Message
from perdure.contracts.timing import current_timing
from perdure.contracts.turn import parse_turn_request
from perdure.stores.commands import FinishTurn
from perdure.stores.ledger import end_turn, latest_owner, read_result, turn_state

_POLL_S_MAX = 0.5
_ASK_EVERY = 4


async def follow_turn(engine: Engine, follow: FollowTurn) -> FollowReply:
    """Wait until the turn has an outcome, or its owner's chain has ended without one.

    An owner that Temporal does not know stays followed: only an operator may decide (DESIGN 4).
    """
    engine.ledger.require(follow.turn)
    poll_s = min(_POLL_S_MAX, current_timing().heartbeat_timeout_s / 4)
    with engine.pulse.beating("follow_turn", activity.heartbeat):
        round_number = 0
        while True:
            result = await engine.ledger.read(read_result, follow.turn.turn_id)
            if result is not None:
                return FollowReply(result=engine.shown(result))
            if round_number % _ASK_EVERY == 0:
                gone = await _epoch_of_closed_owner(engine, follow)
                if gone is not None:
                    return FollowReply(take_over=gone)
            round_number += 1
            await asyncio.sleep(poll_s)


async def end(engine: Engine, command: EndTurn) -> EndReply:
    """End the turn, or return the outcome that came first; None if another owner acts."""
    engine.ledger.require(command.turn)
    opening = command.opening
    if opening is not None:
        message = opening.message
        status, _ = await engine.ledger.read(turn_state, command.turn.turn_id)
        if status is None and not message.parts:
            message = await _message_of_input(engine)
        digest = opening.digest_for(command.turn)
        opening = opening.model_copy(update={"request_digest": digest, "message": message})
    finish = FinishTurn(
        turn=command.turn,
        owner=current_owner(command.run_id),
        status=command.status,
        stop_reason=command.stop_reason,
        detail=command.detail,
        opening=opening,
    )
    with engine.pulse.beating("end", activity.heartbeat):
        result = await engine.ledger.run_to_its_end(end_turn, finish)
    if result is not None:
        engine.telemetry.turn_over(engine.ledger.read, command.turn.turn_id, result)
    searchable = opening is not None and engine.searchable
    return EndReply(result=engine.shown(result), searchable=searchable)


async def _message_of_input(engine: Engine) -> Message:
    # A turn that never opened: its message is nowhere but in the input of its own workflow.
    info = activity.info()
    request = GetWorkflowExecutionHistoryRequest(
        namespace=info.workflow_namespace or info.namespace,
        execution=WorkflowExecution(
            workflow_id=info.workflow_id or "", run_id=info.workflow_run_id or ""
        ),
        maximum_page_size=1,
    )
    found = await engine.client.workflow_service.get_workflow_execution_history(request)
    started = found.history.events[0].workflow_execution_started_event_attributes
    values = await engine.client.data_converter.decode(started.input.payloads)
    return parse_turn_request(values[0]).message


async def _epoch_of_closed_owner(engine: Engine, follow: FollowTurn) -> int | None:
    found = await engine.ledger.read(latest_owner, follow.turn)
    if found is None:
        # A turn that a restored ledger does not know is opened again; an ended one was seen above.
        status, _ = await engine.ledger.read(turn_state, follow.turn.turn_id)
        return 0 if status is None else None
    epoch, owner = found
    if owner == current_owner(follow.run_id):
        # This chain owns the turn itself: it goes on under its own epoch.
        return epoch
    if await owner_state(engine.client, owner) is not OwnerState.CLOSED:
        return None
    engine.telemetry.recovered(Recovery.TAKEN_OVER, follow.turn.turn_id)
    return epoch
