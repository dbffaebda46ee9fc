"""The ledger's commands and replies as frozen values.

Beside the wire contracts they carry what only a worker knows: who runs the activity, which tools
its agent has, what a model said. Replies never carry more than the next activity needs.
"""

import secrets
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from perdure.contracts.calls import Opening, Owner, TurnRef
from perdure.contracts.canonical import sanitise_text
from perdure.contracts.events import ModelAnswered, ModelPrepared, Observation, ToolCalled
from perdure.contracts.messages import Message
from perdure.contracts.model import Usage
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ToolOutcome
from perdure.contracts.turn import TurnResult, TurnStatus


def _clean(outcome: ToolOutcome) -> ToolOutcome:
    full = None if outcome.full is None else sanitise_text(outcome.full)
    return outcome.model_copy(update={"text": sanitise_text(outcome.text), "full": full})


# Real text columns hold no NUL and no lone surrogate (promise P12): replaced where commands begin.
CleanText = Annotated[str, AfterValidator(sanitise_text)]
CleanOutcome = Annotated[ToolOutcome, AfterValidator(_clean)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)


class Eviction(_Value):
    """The holder of the conversation is dead: end it in the transaction that takes the claim."""

    turn_id: str
    epoch: int


class PrepareStep(_Value):
    """Open the turn if `opening` is there and it is new, and fix the request of a model step.

    `token` is random per execution: the same one again is a lost acknowledgement, no new attempt.
    """

    turn: TurnRef
    step: int
    token: str = Field(default_factory=lambda: secrets.token_hex(8))
    owner: Owner | None = None
    opening: Opening | None = None
    eviction: Eviction | None = None
    model: CleanText
    parameters_json: CleanText
    instructions: CleanText
    tools_json: CleanText
    output_json: CleanText | None = None
    worker: CleanText


class PrepareKind(StrEnum):
    """`ready`: call the model. `committed`: the step is answered. `busy`: another turn holds."""

    READY = "ready"
    COMMITTED = "committed"
    OVER = "over"
    FOLLOW = "follow"
    BUSY = "busy"


class Holder(_Value):
    """The turn that holds a conversation, and who runs it."""

    turn_id: str
    epoch: int
    owner: Owner


class StepState(_Value):
    """What a step needs from the ledger to go on."""

    kind: PrepareKind
    agent: str = ""
    tools: tuple[str, ...] | None = None
    epoch: int = 0
    seq: int = 0
    attempt: int = 0
    errors: int = 0
    prepared: ModelPrepared | None = None
    pending: tuple[ToolCalled, ...] = ()
    result: TurnResult | None = None
    holder: Holder | None = None


class PlannedCall(_Value):
    """A call of the answer; with `refusal` it is closed at once and nothing is executed."""

    called: ToolCalled
    refusal: CleanOutcome | None = None


class CommitAnswer(_Value):
    """Commit the answer of one attempt; without calls it commits the turn (promise P6).

    `output_json` is the validated answer of an agent with an output type; `output_problem` says why
    there is none: the model is asked again, or the turn fails.
    """

    turn: TurnRef
    answered: ModelAnswered
    calls: tuple[PlannedCall, ...] = ()
    output_json: CleanText | None = None
    output_problem: CleanText | None = None


class FailAttempt(_Value):
    """A model reported an error: count it. Lost workers do not come here."""

    turn: TurnRef
    step: int
    attempt: int
    error_code: CleanText
    usage: Usage = Usage()


class DispatchCall(_Value):
    """T1. `token` is random per activity execution; `rerun_of` names a lost generation.

    With `only_looking` nothing is dispatched: the reply tells what is known of the holder.
    """

    turn: TurnRef
    step: int
    index: int
    token: str
    safety: ReplaySafety
    worker: CleanText
    activity: str
    activity_attempt: int
    holder_lost_ms: int
    rerun_of: int | None = None
    only_looking: bool = False


class DispatchKind(StrEnum):
    """The answers of T1 (DESIGN 5)."""

    MINE = "mine"
    HELD = "held"
    SETTLED = "settled"
    OVER = "over"
    FENCED = "fenced"


class DispatchReply(_Value):
    """`mine` carries the final arguments; `held` says what is known of the holder."""

    kind: DispatchKind
    seq: int = 0
    operation_id: str = ""
    generation: int = 0
    called: ToolCalled | None = None
    safety: ReplaySafety = ReplaySafety.UNSAFE
    holder_is_lost: bool = False
    holder_is_earlier_attempt: bool = False
    rerun_allowed: bool = False
    errors: int = 0
    result: TurnResult | None = None


class SettleCall(_Value):
    """T2: the outcome of one execution."""

    turn: TurnRef
    operation_id: str
    token: str
    generation: int
    outcome: CleanOutcome


class CloseCall(_Value):
    """Give a call a result without an outcome of its tool.

    With `generation`, only if that generation is the latest and lost; without, only if nothing was
    ever dispatched ("it did not run" is said in the transaction that makes it impossible, P4).
    """

    turn: TurnRef
    step: int
    index: int
    outcome: CleanOutcome
    generation: int | None = None
    holder_lost_ms: int = 0


class ReportReconcile(_Value):
    """What a tool's reconcile function said of a generation, and the result where it knows one."""

    turn: TurnRef
    step: int
    index: int
    generation: int
    observation: Observation
    outcome: CleanOutcome | None = None


class FinishTurn(_Value):
    """End a turn failed or cancelled; `opening` makes a tombstone of an unknown one."""

    turn: TurnRef
    owner: Owner
    status: TurnStatus
    stop_reason: CleanText
    detail: CleanText = ""
    opening: Opening | None = None


class TurnContext(_Value):
    """All that a prepared request is made of."""

    instructions: str
    tools_json: str
    output_json: str | None = None
    messages: tuple[Message, ...]
