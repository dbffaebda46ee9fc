"""What readers get of a turn: everything `perdure turn show` and a follower need, without SQL."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from perdure.contracts.events import LedgerEvent
from perdure.contracts.model import Usage
from perdure.contracts.turn import TurnStatus


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")


class RecordedEvent(_View):
    """An event with its place in the conversation (`ordinal`) and in its turn (`seq`)."""

    ordinal: int
    seq: int
    event: LedgerEvent


class TurnView(_View):
    """A turn, whole answer included."""

    turn_id: str
    namespace: str
    conversation_id: str
    request_id: str
    agent: str
    status: TurnStatus
    stop_reason: str | None
    detail: str | None
    request_digest: str
    answer: str | None
    epoch: int
    steps: int
    usage: Usage
    conversation_version: int
    opened_at: datetime
    ended_at: datetime | None


class OwnerView(_View):
    """Who acted for the turn from an epoch on, and why: `opened` or `taken_over`."""

    epoch: int
    temporal_namespace: str
    workflow_id: str
    run_id: str
    reason: str
    taken_at: datetime


class ModelAttemptView(_View):
    """One attempt of a model step: `started`, `committed`, `failed`, `lost` or `superseded`."""

    step: int
    attempt: int
    status: str
    model: str
    usage: Usage
    error_code: str | None
    worker: str
    started_at: datetime
    ended_at: datetime | None


class GenerationView(_View):
    """One execution that the gate allowed; `outcome` is `won`, `late`, `error` or None."""

    generation: int
    safety: str
    worker: str
    started_at: datetime
    stopped: bool
    outcome: str | None


class OperationView(_View):
    """One call: its result if there is one, and every execution."""

    operation_id: str
    step: int
    index: int
    tool: str
    safety: str
    arguments: str
    status: str | None
    reason: str | None
    text: str | None
    flags: tuple[str, ...] = ()
    full_digest: str | None = None
    generations: tuple[GenerationView, ...] = ()


class LateResultView(_View):
    """A result that came after its call was closed; the model was never told."""

    operation_id: str
    generation: int
    status: str
    text: str
    reason: str
    recorded_at: datetime


class PartialView(_View):
    """Streamed text of an attempt; `reason` is set once it was aborted."""

    subject: str
    attempt: int
    text: str
    thinking: str = ""
    reason: str | None = None


class TurnDetails(_View):
    """All that happened in a turn."""

    turn: TurnView
    owners: tuple[OwnerView, ...]
    model_attempts: tuple[ModelAttemptView, ...]
    operations: tuple[OperationView, ...]
    late_results: tuple[LateResultView, ...]
    aborted_partials: tuple[PartialView, ...]
