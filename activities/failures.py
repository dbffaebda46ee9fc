"""The one place where errors become Temporal failures (DESIGN 5).

What is raised to Temporal or logged is a code and a short sentence of ours: never a prompt, a
value, a provider's text or an SQL parameter.
"""

import functools
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.contracts.errors import (
    ERROR_CODES_AT_OPENING,
    ModelError,
    OwnershipError,
    PerdureError,
    RequestError,
    StepLimit,
)

_BENIGN = ApplicationErrorCategory.BENIGN

logger = logging.getLogger("perdure.activities")

_DELAY_S_MIN = 0.001
_DELAY_S_MAX = 86_400.0

Activity = Callable[[Any], Awaitable[dict[str, Any]]]


def retry_delay(asked_s: float | None) -> timedelta | None:
    """The wait that a tool or a provider asks for, as Temporal takes it; None is its own back-off.

    Nothing at all would be that too, so it becomes a moment; NaN and infinity are nobody's wish.
    """
    if asked_s is None or not math.isfinite(asked_s):
        return None
    return timedelta(seconds=min(max(_DELAY_S_MIN, asked_s), _DELAY_S_MAX))


def as_failure(error: PerdureError, *, retry_after_s: float | None = None) -> ApplicationError:
    """A Temporal failure whose type is the error's code."""
    expected = isinstance(error, (RequestError, OwnershipError, ModelError, StepLimit))
    return ApplicationError(
        str(error),
        type=error.code,
        non_retryable=not error.retryable,
        next_retry_delay=retry_delay(retry_after_s),
        # An expected answer is no incident of the worker: no traceback in its log.
        category=_BENIGN if expected else ApplicationErrorCategory.UNSPECIFIED,
    )


def translated(function: Activity, *, for_ever: bool = False) -> Activity:
    """Wrap an activity so that only failures of ours leave it.

    With `for_ever`, everything but a refusal of the request is tried again: a workflow could do
    nothing else with such a failure.
    """

    @functools.wraps(function)
    async def run(value: Any) -> dict[str, Any]:
        try:
            return await function(value)
        except ApplicationError:
            raise
        except PerdureError as error:
            if for_ever and error.code not in ERROR_CODES_AT_OPENING:
                error.retryable = True
            raise as_failure(error) from None
        except AssertionError as error:
            raise _bug(error, "AssertionError", retryable=for_ever) from None
        except Exception as error:  # The process's edge: its text could carry anybody's values.
            raise _bug(error, "internal_error", retryable=True) from None

    return run


def _bug(error: Exception, code: str, *, retryable: bool) -> ApplicationError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.name} line {frame.lineno}"
    logger.error("%s in %s", type(error).__name__, where)
    return ApplicationError(
        f"{type(error).__name__} in {where}; see the worker's log",
        type="internal_error" if retryable else code,
        non_retryable=not retryable,
    )
