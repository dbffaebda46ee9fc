"""Everything the ledger remembers: immutable facts of one turn, told apart by `kind`.

An event's id is derived from its subject, so an exact retry has the same id and the same content
(promise P5). `seq` and `ordinal` are not part of it: the ledger assigns them under its lock.
Unknown fields are ignored, so that an older program can read a newer event.
"""

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from perdure.contracts.canonical import canonical_json, digest_parts, sanitised
from perdure.contracts.messages import Message, Part
from perdure.contracts.model import FinishReason, Usage
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.contracts.turn import TurnLimits, TurnStatus


class Observation(StrEnum):
    """What a reconcile function found out about one generation."""

    EXECUTED = "executed"
    NOT_EXECUTED = "not_executed"
    UNKNOWN = "unknown"


class Decision(StrEnum):
    """What followed from it (seed 3.3, recovery bundle)."""

    COMPLETED = "completed"
    RERUN = "rerun"
    PARKED = "parked"


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    id: str
    namespace: str
    conversation_id: str
    turn_id: str


class UserMessageRecorded(_Event):
    """The turn was opened: always its first event. Pins what the turn may use."""

    kind: Literal["user_message"] = "user_message"
    agent: str
    request_id: str
    request_digest: str
    message: Message
    tools: tuple[str, ...] | None = None
    limits: TurnLimits = TurnLimits()
    parameters: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    expected_version: int = 0


class ModelPrepared(_Event):
    """The request of a model step is fixed; every attempt sends the same one.

    The window is transcript messages `window_from..window_through` (1-based; 0 and 0: none) and the
    turn's own events up to seq `events_through`.
    """

    kind: Literal["model_prepared"] = "model_prepared"
    step: int
    prepared: int
    model: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    instructions_digest: str
    tools_digest: str
    output_digest: str | None = None
    window_from: int = 0
    window_through: int = 0
    events_through: int = 0


class ModelAnswered(_Event):
    """A committed answer: never bought again (promise P7)."""

    kind: Literal["model_answered"] = "model_answered"
    step: int
    attempt: int
    model: str = ""
    parts: tuple[Part, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage = Usage()


class OutputRefused(_Event):
    """A committed answer does not fit the agent's output type; `text` tells the model why."""

    kind: Literal["output_refused"] = "output_refused"
    step: int
    text: str


class ToolCalled(_Event):
    """One call of an answer, with its final arguments."""

    kind: Literal["tool_called"] = "tool_called"
    step: int
    index: int
    operation_id: str
    tool: str
    provider_call_id: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    arguments_digest: str
    safety: ReplaySafety


class ToolDispatched(_Event):
    """T1: from here on the effect may have started."""

    kind: Literal["tool_dispatched"] = "tool_dispatched"
    step: int
    index: int
    operation_id: str
    tool: str
    arguments_digest: str
    safety: ReplaySafety


class ToolSettled(_Event):
    """T2, or the closing of a call that has no outcome: its one result (promise P4)."""

    kind: Literal["tool_settled"] = "tool_settled"
    step: int
    index: int
    operation_id: str
    tool: str
    status: ResultStatus
    reason: ResultReason | None = None
    text: str
    flags: tuple[str, ...] = ()
    full_digest: str | None = None
    generation: int = 0
    structured: JsonValue = None


class ReconcileReported(_Event):
    """What the tool's own reconcile function said of a generation."""

    kind: Literal["reconcile_reported"] = "reconcile_reported"
    operation_id: str
    generation: int
    observation: Observation


class RecoveryDecided(_Event):
    """What the gate decided on that observation."""

    kind: Literal["recovery_decided"] = "recovery_decided"
    operation_id: str
    generation: int
    decision: Decision


class TurnEnded(_Event):
    """The one terminal event, the last of its turn (promise P1)."""

    kind: Literal["turn_ended"] = "turn_ended"
    status: TurnStatus
    stop_reason: str
    detail: str = ""
    answer_step: int | None = None
    usage: Usage = Usage()
    conversation_version: int = 0
    unclosed: tuple[str, ...] = ()


LedgerEvent = Annotated[
    UserMessageRecorded
    | ModelPrepared
    | ModelAnswered
    | OutputRefused
    | ToolCalled
    | ToolDispatched
    | ToolSettled
    | ReconcileReported
    | RecoveryDecided
    | TurnEnded,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[LedgerEvent] = TypeAdapter(LedgerEvent)


def encode_event(event: LedgerEvent) -> str:
    """The event's canonical JSON: what is stored, compared and digested.

    Text that no database holds is replaced here, at the single point where events are written.
    """
    # In JSON mode pydantic would write NaN and infinity as null, unseen by `canonical_json`.
    payload = canonical_json(event.model_dump(mode="python"))
    if "\\u0000" in payload or not _is_unicode(payload):
        payload = canonical_json(sanitised(json.loads(payload)))
    return payload


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_event(payload: str) -> LedgerEvent:
    """Read a stored event. Raises ValueError if it is none."""
    return _ADAPTER.validate_json(payload)


def chain_digest(previous: str, turn_id: str, seq: int, payload: str) -> str:
    """Digest of event `seq`, chained over the turn; `previous` is "" for the first."""
    return digest_parts("perdure.turn-chain.v1", (previous, turn_id, seq, payload))


def user_event_id(turn_id: str) -> str:
    """Id of the turn's first event."""
    return f"{turn_id}.user"


def prepared_event_id(turn_id: str, step: int, prepared: int) -> str:
    """Id of prepared fact `prepared` of a step."""
    return f"{turn_id}.step{step}.prepared{prepared}"


def answered_event_id(turn_id: str, step: int) -> str:
    """Id of a step's answer."""
    return f"{turn_id}.step{step}.answer"


def refused_event_id(turn_id: str, step: int) -> str:
    """Id of the refusal of a step's structured answer."""
    return f"{turn_id}.step{step}.refused"


def called_event_id(operation_id: str) -> str:
    """Id of a call."""
    return f"{operation_id}_call"


def dispatched_event_id(operation_id: str) -> str:
    """Id of a dispatch."""
    return f"{operation_id}_dispatch"


def settled_event_id(operation_id: str) -> str:
    """Id of a call's result."""
    return f"{operation_id}_outcome"


def ended_event_id(turn_id: str) -> str:
    """Id of the terminal event."""
    return f"{turn_id}.end"
