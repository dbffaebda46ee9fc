"""Activity options in one place: a contract, a value, and a reply or a problem."""

from datetime import timedelta
from typing import Any, Final, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.workflow import ActivityCancellationType

from perdure.contracts.calls import ActivityContract, WireModel
from perdure.contracts.safety import RetryPlan
from perdure.contracts.timing import current_timing
from perdure.workflows._decide import Problem

In = TypeVar("In", bound=WireModel)
Out = TypeVar("Out", bound=WireModel)

# Lost workers are seen by their heartbeats and the activities end their own waits: Temporal's
# start-to-close is only the last resort.
START_TO_CLOSE_MAX_S: Final = 86_400.0
LOST: Final = "activity_lost"


async def attempt(
    contract: ActivityContract[In, Out],
    value: In,
    *,
    summary: str,
    start_to_close_s: float = START_TO_CLOSE_MAX_S,
    waits_for_cancel: bool = False,
) -> Out | Problem:
    """Run the activity as its contract says. A cancellation is raised, never a problem."""
    try:
        raw: dict[str, Any] = await workflow.execute_activity(
            contract.name,
            value.encode(),
            result_type=dict[str, Any],
            summary=summary,
            start_to_close_timeout=timedelta(seconds=start_to_close_s),
            heartbeat_timeout=timedelta(seconds=current_timing().heartbeat_timeout_s),
            retry_policy=_policy(contract.plan),
            cancellation_type=(
                ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
                if waits_for_cancel
                else ActivityCancellationType.TRY_CANCEL
            ),
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        return _problem(error)
    return contract.gives.model_validate(raw)


def _policy(plan: RetryPlan) -> RetryPolicy:
    return RetryPolicy(
        maximum_attempts=plan.attempts_max,
        initial_interval=timedelta(seconds=plan.interval_initial_s),
        backoff_coefficient=plan.backoff,
        maximum_interval=timedelta(seconds=plan.interval_max_s),
        non_retryable_error_types=list(plan.never_retried),
    )


def _problem(error: ActivityError) -> Problem:
    cause = error.cause
    if isinstance(cause, ApplicationError):
        # A worker without the activity is as good as none.
        code = cause.type if cause.type not in (None, "NotFoundError") else LOST
        return Problem(code=code, detail=cause.message)
    return Problem(code=LOST, detail="the activity was lost; see its attempts")
