"""Replay safety and what follows from it: pure functions, no I/O (DESIGN 5, promises P2 and P3).

The retry plan is only the first line: one attempt is not at-most-once on Temporal. The guarantee is
the gate in front of every effect, which reads the ledger.
"""

from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict


class ReplaySafety(StrEnum):
    """What may be done with an effect whose outcome is unknown."""

    SAFE = "safe"
    KEYED = "keyed"
    RECONCILED = "reconciled"
    UNSAFE = "unsafe"


class LostEffect(StrEnum):
    """What the gate does with a dispatched generation whose worker is lost."""

    RERUN = "rerun"
    RECONCILE = "reconcile"
    INTERRUPT = "interrupt"


_STRICTNESS: Final = {
    ReplaySafety.SAFE: 0,
    ReplaySafety.KEYED: 1,
    ReplaySafety.RECONCILED: 2,
    ReplaySafety.UNSAFE: 3,
}

TOOL_ERROR_TRIES: Final = 4
MODEL_ERROR_TRIES: Final = 4
# Temporal's own bound: lost workers do not eat the tries that the ledger counts.
TEMPORAL_ATTEMPTS_MAX: Final = 24
RESCHEDULE_DELAYS_S: Final = (1.0, 5.0, 25.0)

# Retrying these would only repeat a bug, a refusal or a missing registration.
NEVER_RETRIED: Final = (
    "AssertionError",
    "NotFoundError",
    "PayloadsTooLarge",
)


class RetryPlan(BaseModel):
    """How often Temporal may try an activity, and how long it waits between tries (seconds)."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    attempts_max: int
    interval_initial_s: float = 2.0
    backoff: float = 2.0
    interval_max_s: float = 60.0
    never_retried: tuple[str, ...] = NEVER_RETRIED


ONE_ATTEMPT: Final = RetryPlan(attempts_max=1)
REPEATED: Final = RetryPlan(attempts_max=TEMPORAL_ATTEMPTS_MAX)
# 0 means without limit.
FOR_EVER: Final = RetryPlan(attempts_max=0, interval_initial_s=1.0, interval_max_s=10.0)


def stricter(one: ReplaySafety, other: ReplaySafety) -> ReplaySafety:
    """The stricter of two declarations: a current unsafe vetoes a stored safe (seed 2.2 #15)."""
    return max(one, other, key=_STRICTNESS.__getitem__)


def retry_plan(safety: ReplaySafety) -> RetryPlan:
    """The Temporal retry plan of a tool with that safety."""
    return REPEATED if safety in (ReplaySafety.SAFE, ReplaySafety.KEYED) else ONE_ATTEMPT


def after_lost_effect(safety: ReplaySafety) -> LostEffect:
    """What becomes of a generation that was dispatched and whose worker is gone."""
    match safety:
        case ReplaySafety.SAFE | ReplaySafety.KEYED:
            return LostEffect.RERUN
        case ReplaySafety.RECONCILED:
            return LostEffect.RECONCILE
        case ReplaySafety.UNSAFE:
            return LostEffect.INTERRUPT


def backoff_s(errors_reported: int) -> float:
    """Seconds before the next try after that many reported errors: 2, 4, 8 ... 60."""
    # The exponent is bounded too: a float overflows at 1024.
    return min(2.0 ** min(max(errors_reported, 1), 6), 60.0)
