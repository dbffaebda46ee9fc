"""What a tool looks like from outside, and what one call of it comes to."""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from perdure.contracts.ids import ToolName
from perdure.contracts.limits import TOOL_TEXT_BYTES_MAX, TOOL_TEXT_LINES_MAX


def head_for_model(text: str) -> str:
    """The head of a text that a model is shown: at most 50 KiB and 2000 lines (DESIGN 10)."""
    head = text
    if len(text) * 4 > TOOL_TEXT_BYTES_MAX:
        head = text.encode("utf-8", "replace")[:TOOL_TEXT_BYTES_MAX].decode(errors="ignore")
    lines = head.split("\n", TOOL_TEXT_LINES_MAX)
    return "\n".join(lines[:TOOL_TEXT_LINES_MAX])


class ToolSpec(BaseModel):
    """What a model is told of a tool: the schema is a JSON schema of an object."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})


class ResultStatus(StrEnum):
    """How a call was closed. Only `ok` and `error` come from the tool itself.

    `interrupted`: dispatched, outcome unknown. `not_executed`: closed by the transaction that made
    it impossible to run later. `refused`: never a valid call.
    """

    OK = "ok"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    NOT_EXECUTED = "not_executed"
    REFUSED = "refused"


class ResultReason(StrEnum):
    """Why a call has no outcome of its tool."""

    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    CAPABILITY_DENIED = "capability_denied"
    TOO_MANY_CALLS = "too_many_calls"
    TOOL_ERROR = "tool_error"
    WORKER_LOST = "worker_lost"
    TIMED_OUT = "timed_out"
    UNKNOWN_OUTCOME = "unknown_outcome"
    TOOL_UNAVAILABLE = "tool_unavailable"
    TURN_CANCELLED = "turn_cancelled"
    TURN_FAILED = "turn_failed"


class ToolOutcome(BaseModel):
    """The result of one call as the ledger keeps it.

    `text` is what the model is told (bounded); `full` the whole result where `text` was cut;
    `structured` what the tool gave beside the text, for programs; `flags` what was done to them:
    `sanitised`, `cut`, `not_json`, `dropped`, `structured_dropped`.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    status: ResultStatus
    text: str
    reason: ResultReason | None = None
    flags: tuple[str, ...] = ()
    full: str | None = None
    structured: JsonValue = None

    @property
    def is_error(self) -> bool:
        """Whether the model is told that the call did not simply succeed."""
        return self.status is not ResultStatus.OK
