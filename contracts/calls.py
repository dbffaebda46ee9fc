"""Every effect the system can have, as typed activity contracts, on one screen.

| activity                   | what it does                                             | retried  |
|----------------------------|----------------------------------------------------------|----------|
| `call_model`               | opens the turn, buys one answer, commits it or the turn  | 24 times |
| `<agent>.<tool>`           | the gate: T1, the effect, T2                             | by safety|
| `<agent>.<tool>:reconcile` | asks a RECONCILED tool about a lost generation           | 24 times |
| `settle`                   | the gate without an effect, for tools that no worker has | for ever |
| `follow_turn`              | waits for a turn that another owner runs                 | for ever |
| `end`                      | ends a turn failed or cancelled, closing open calls      | for ever |

Inputs are identities and decisions, never transcripts (promise P9). They cross Temporal as plain
JSON objects that both sides encode and decode themselves, without default values, so any data
converter works and histories stay small.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_serializer, field_validator

from perdure.contracts.ids import (
    TurnKey,
    derive_operation_id,
    reconcile_activity_type,
    tool_activity_type,
)
from perdure.contracts.messages import Message, user_message
from perdure.contracts.safety import FOR_EVER, REPEATED, ReplaySafety, RetryPlan, retry_plan
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.contracts.turn import TurnLimits, TurnRequest, TurnResult, TurnStatus

_KEY: Final = set(TurnKey.model_fields)


class WireModel(BaseModel):
    """What crosses between a workflow and an activity."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    def encode(self) -> dict[str, Any]:
        """Plain JSON without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)


class TurnRef(TurnKey):
    """A turn and what this owner knows of it: epoch, ledger identity, last `seq` it has seen."""

    epoch: int = 0
    store: str = ""
    seq: int = 0


class Owner(WireModel):
    """Who acts for a turn. `run_id` is its chain's first: reset and continue-as-new keep it."""

    temporal_namespace: str
    workflow_id: str
    run_id: str


class Opening(WireModel):
    """What the first model step opens the turn with.

    `take_over` names the epoch it succeeds; `request_digest` is left to the ledger's side where
    the content is here to compute it from. A message of plain text travels as a string.
    """

    agent: str
    message: Message
    request_digest: str = ""
    tools: tuple[str, ...] | None = None
    limits: TurnLimits = TurnLimits()
    parameters: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    run_id: str
    take_over: int | None = None

    @field_serializer("message")
    def _encode_message(self, message: Message) -> dict[str, Any] | str:
        if message == user_message(message.text):
            return message.text
        # A part is told by its `type`, which is a default and would be left out.
        return message.model_dump(mode="json")

    @field_validator("message", mode="before")
    @classmethod
    def _decode_message(cls, value: Any) -> Any:
        return user_message(value) if isinstance(value, str) else value

    def digest_for(self, key: TurnKey) -> str:
        """The request's digest."""
        if self.request_digest:
            return self.request_digest
        content = self.model_dump(include={"agent", "tools", "limits", "parameters"})
        request = TurnRequest(message=self.message, **content, **key.model_dump(include=_KEY))
        return request.digest


class CallModel(WireModel):
    """One model step. `opening` is there until the turn is known to be open."""

    turn: TurnRef
    step: int
    opening: Opening | None = None


class StepKind(StrEnum):
    """What a model step came to. `over` and `follow` may come from any activity."""

    CALLS = "calls"
    OVER = "over"
    FOLLOW = "follow"


class CallRef(WireModel):
    """One call that must be settled before the next model step."""

    index: int
    tool: str
    safety: ReplaySafety
    timeout_s: float | None = None
    preview: str = ""

    def operation_id(self, turn_id: str, step: int) -> str:
        """The call's derived operation id."""
        return derive_operation_id(turn_id, step, self.index)


class StepReply(WireModel):
    """`calls` (may be empty: go on to the next step), `over` with the result, or `follow`.

    `attempts` and `model_errors` say how the answer was come by; `searchable`, in a first reply,
    that the server knows our search attributes.
    """

    kind: StepKind
    agent: str = ""
    epoch: int = 0
    store: str = ""
    seq: int = 0
    calls: tuple[CallRef, ...] = ()
    result: TurnResult | None = None
    attempts: int = 1
    model_errors: int = 0
    searchable: bool = False


class CallTool(WireModel):
    """One call through the gate."""

    turn: TurnRef
    step: int
    index: int


class CallReplyKind(StrEnum):
    """What became of a call. `reconcile`: ask the tool about the lost generation first."""

    SETTLED = "settled"
    RECONCILE = "reconcile"
    OVER = "over"
    FOLLOW = "follow"


class CallReply(WireModel):
    """The reply of the gate; the result itself stays in the ledger.

    For the operator's eyes it says how a settled call went: status and reason of its result, the
    generation that ran last, and whether a late result stands beside it.
    """

    kind: CallReplyKind
    seq: int = 0
    result: TurnResult | None = None
    status: ResultStatus = ResultStatus.OK
    reason: ResultReason | None = None
    generation: int = 1
    late: bool = False


class Settle(CallTool):
    """Close a call that no worker can run."""

    reason: ResultReason = ResultReason.TOOL_UNAVAILABLE


class FollowTurn(WireModel):
    """Wait for a turn's outcome; `run_id` is the follower's own chain."""

    turn: TurnRef
    run_id: str


class FollowReply(WireModel):
    """`over` with the result, or the epoch of an owner that is gone: take over from it."""

    result: TurnResult | None = None
    take_over: int | None = None


class EndTurn(WireModel):
    """End a turn. `opening` is there until the turn is known to be open (tombstone)."""

    turn: TurnRef
    run_id: str
    status: TurnStatus
    stop_reason: str
    detail: str = ""
    opening: Opening | None = None


class EndReply(WireModel):
    """The outcome, which may be another one that came first; None where a newer owner acts."""

    result: TurnResult | None = None
    searchable: bool = False


In = TypeVar("In", bound=WireModel)
Out = TypeVar("Out", bound=WireModel)


@dataclass(frozen=True)
class ActivityContract(Generic[In, Out]):
    """Name, types and retry plan of an activity: all a workflow knows of it."""

    name: str
    takes: type[In]
    gives: type[Out]
    plan: RetryPlan


CALL_MODEL: Final = ActivityContract("call_model", CallModel, StepReply, REPEATED)
FOLLOW_TURN: Final = ActivityContract("follow_turn", FollowTurn, FollowReply, FOR_EVER)
END: Final = ActivityContract("end", EndTurn, EndReply, FOR_EVER)
SETTLE: Final = ActivityContract("settle", Settle, CallReply, FOR_EVER)
FIXED_CONTRACTS: Final = (CALL_MODEL, FOLLOW_TURN, END, SETTLE)


def tool_contract(
    agent: str, tool: str, safety: ReplaySafety
) -> ActivityContract[CallTool, CallReply]:
    """The contract of a tool's activity."""
    return ActivityContract(
        tool_activity_type(agent, tool), CallTool, CallReply, retry_plan(safety)
    )


def reconcile_contract(agent: str, tool: str) -> ActivityContract[CallTool, CallReply]:
    """The contract of a tool's reconcile activity."""
    return ActivityContract(reconcile_activity_type(agent, tool), CallTool, CallReply, REPEATED)
