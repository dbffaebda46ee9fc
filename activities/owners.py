"""Asking Temporal whether the workflow that owns a turn still runs.

"Closed" may free a conversation, so it is only said of a chain that Temporal itself shows as closed
or replaced; whatever cannot be asked counts as alive.
"""

import logging
from enum import StrEnum

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.contracts.calls import Owner

logger = logging.getLogger("perdure.activities")

_OPEN = {
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING,
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_PAUSED,
}


class OwnerState(StrEnum):
    """`gone`: Temporal does not know the workflow (any more); only an operator may decide."""

    ALIVE = "alive"
    CLOSED = "closed"
    GONE = "gone"


async def owner_state(client: Client, owner: Owner) -> OwnerState:
    """Whether the owner's chain of runs goes on."""
    request = DescribeWorkflowExecutionRequest(
        namespace=owner.temporal_namespace,
        execution=WorkflowExecution(workflow_id=owner.workflow_id),
    )
    try:
        described = await client.workflow_service.describe_workflow_execution(request)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return OwnerState.GONE
        logger.warning("Temporal cannot be asked about an owner: %s", error.status.name)
        return OwnerState.ALIVE
    info = described.workflow_execution_info
    runs = info.status in _OPEN
    # The newest run of that id belongs to another chain: this owner's has ended.
    if info.first_run_id and info.first_run_id != owner.run_id:
        return OwnerState.CLOSED
    return OwnerState.ALIVE if runs else OwnerState.CLOSED
