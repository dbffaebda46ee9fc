"""Starting a turn and waiting for it.

Identity is in the input: the same request again gives the same turn. Giving up a wait never
touches the work.
"""

from dataclasses import dataclass
from typing import Any

from temporalio.client import Client, WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, CancelledError

from perdure.contracts import errors
from perdure.contracts.errors import PerdureError, RequestConflict, TurnFailed
from perdure.contracts.ids import TurnKey, turn_workflow_id
from perdure.contracts.model import Usage
from perdure.contracts.turn import (
    StopReason,
    TurnRequest,
    TurnResult,
    TurnStatus,
    parse_turn_request,
)

DEFAULT_TASK_QUEUE = "perdure"


@dataclass(frozen=True)
class TurnHandle:
    """A started turn; it can be rebuilt in another process from its ids.

    Without `request_digest` nobody checks that the request had the content this caller thinks of.
    """

    client: Client
    key: TurnKey
    workflow_id: str
    request_digest: str = ""

    @property
    def turn_id(self) -> str:
        """The turn's id in the ledger."""
        return self.key.turn_id

    async def wait(self) -> TurnResult:
        """See `wait`."""
        return await wait(self)

    async def cancel(self) -> None:
        """Ask for cancellation; the turn ends `cancelled` unless its answer came first."""
        await self.client.get_workflow_handle(self.workflow_id).cancel()


async def start(
    client: Client,
    request: TurnRequest | dict[str, Any],
    *,
    task_queue: str = DEFAULT_TASK_QUEUE,
) -> TurnHandle:
    """Start a turn, or attach to the one this request already is.

    Raises InvalidRequest for bad input before anything is sent.
    """
    parsed = parse_turn_request(request)
    workflow_id = turn_workflow_id(parsed.namespace, parsed.conversation_id, parsed.request_id)
    await client.start_workflow(
        "AgentTurn",
        parsed.as_input(),
        id=workflow_id,
        task_queue=task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        static_summary=f"{parsed.agent} · {parsed.conversation_id}",
    )
    return TurnHandle(
        client=client, key=parsed.key, workflow_id=workflow_id, request_digest=parsed.digest
    )


async def wait(handle: TurnHandle) -> TurnResult:
    """Wait for the turn's outcome, also a failed or cancelled one.

    Raises RequestConflict if the request id stands for other content, and the typed refusal
    (UnknownAgent, ConversationBusy, ...) if the turn never opened.
    """
    workflow = handle.client.get_workflow_handle(handle.workflow_id, result_type=dict[str, Any])
    try:
        result = TurnResult.model_validate(await workflow.result())
    except WorkflowFailureError as failure:
        result = _result_of(failure.cause, handle)
    known = result.request_digest and handle.request_digest
    if known and result.request_digest != handle.request_digest:
        raise RequestConflict(
            f"request {handle.key.request_id} was used before with other content; "
            "use a new request id"
        )
    return result


def _result_of(cause: BaseException | None, handle: TurnHandle) -> TurnResult:
    if isinstance(cause, CancelledError):
        return TurnResult(
            turn_id=handle.turn_id,
            status=TurnStatus.CANCELLED,
            stop_reason=StopReason.CANCELLED,
            usage=Usage(),
        )
    if isinstance(cause, ApplicationError):
        if cause.details:
            return TurnResult.model_validate(cause.details[0])
        raise _refusal(cause.type or "", cause.message)
    raise TurnFailed(StopReason.TURN_LOST, "the workflow ended without an outcome")


def _refusal(code: str, message: str) -> PerdureError:
    refusals = [errors.RequestError, *errors.RequestError.__subclasses__()]
    refusals += [inner for refusal in refusals for inner in refusal.__subclasses__()]
    for refusal in refusals:
        if refusal.code == code:
            return refusal(message)
    return TurnFailed(code, message)
