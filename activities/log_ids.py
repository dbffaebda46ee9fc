"""Which turn, step, operation and attempt an activity's log records belong to.

Read from the activity's input, which the activity itself still has to validate: whatever is odd
about it, the records then merely lack their ids.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from pydantic import ValidationError
from temporalio import activity

from perdure.contracts.calls import TurnRef
from perdure.contracts.ids import derive_operation_id
from perdure.logs import bind

Activity = Callable[[Any], Awaitable[dict[str, Any]]]


def with_log_ids(function: Activity) -> Activity:
    """Wrap an activity so that all it logs carries its ids, and what its tasks log as well."""

    @functools.wraps(function)
    async def run(value: Any) -> dict[str, Any]:
        # Derived when a first record is written: a silent activity pays nothing.
        bind(functools.cache(functools.partial(ids_of, value, activity.info().attempt)))
        return await function(value)

    return run


def ids_of(value: Any, attempt: int) -> Mapping[str, Any]:
    """The ids that an activity's input holds; `attempt` is Temporal's."""
    known: dict[str, Any] = {"attempt": attempt}
    if not isinstance(value, dict):
        return known
    fields = cast("dict[str, Any]", value)
    try:
        turn_id = TurnRef.model_validate(fields.get("turn")).turn_id
    except ValidationError:
        return known
    step, index = fields.get("step"), fields.get("index")
    known["turn"] = turn_id
    if isinstance(step, int):
        known["step"] = step
        if isinstance(index, int):
            known["operation"] = derive_operation_id(turn_id, step, index)
    return known
