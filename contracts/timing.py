"""The few durations everything waits by, set once per process by the composition root.

All waits derive from the heartbeat timeout (DESIGN 5), so tests run at one second. Workflows read
it when they schedule an activity; Temporal does not compare time-outs on replay.
"""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field


class Timing(BaseModel):
    """Seconds, all of them."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    model_timeout_s: float = Field(default=600.0, gt=0)
    tool_timeout_s: float = Field(default=300.0, gt=0)
    cancel_grace_s: float = Field(default=5.0, ge=0)

    @property
    def alive_renewal_s(self) -> float:
        """How often a holder shows in the ledger that it lives."""
        return self.heartbeat_timeout_s / 2

    @property
    def holder_lost_s(self) -> float:
        """Age of the last sign of life after which a holder counts as lost."""
        return self.heartbeat_timeout_s * 2


# A tool ends its own wait at its time-out; Temporal's start-to-close must not come first.
START_TO_CLOSE_MARGIN_S: Final = 60.0


class _Current:
    timing = Timing()


def current_timing() -> Timing:
    """The process's timing."""
    return _Current.timing


def set_timing(timing: Timing) -> None:
    """Set the process's timing; called by `worker.py` before anything runs."""
    _Current.timing = timing
