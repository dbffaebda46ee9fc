"""One tree of errors. Each class has a stable `code`, which is also the Temporal failure type.

    PerdureError
    ├── RequestError            the caller's fault; nothing was written
    │   ├── InvalidRequest · InvalidIdentifier · MessageTooLarge · MessageBlank
    │   ├── UnknownAgent · CapabilityDenied · RequestConflict · NamespaceMismatch
    │   └── ConversationBusy · SummaryRequired
    ├── OwnershipError          somebody else acts for this turn
    │   └── Fenced · Superseded
    ├── StoreError              the ledger could not, or would not, do it
    │   ├── StoreUnavailable · WrongStore · LedgerBehind
    │   ├── StoreSchemaNewer · StoreSchemaOld · StoreUnreadable
    │   ├── LedgerRejection     the command is wrong, the store is healthy
    │   └── LedgerCorruption    the store is damaged
    ├── CheckpointError         CheckpointConflict · CheckpointMissing · CheckpointUnsupported
    ├── ConversationError       ConversationConflict · ConversationMissing · ConversationInvalid
    ├── ModelError              ModelProtocolError · ModelScriptError
    │   ├── ModelUnavailable    ModelRateLimited
    │   └── ModelRefused        ModelCredentialsRefused · ModelUnknown · ModelContextOverflow
    │                           ModelContentRefused · ModelPartUnsupported
    ├── ToolError               raised by tools; becomes a result for the model
    ├── AgentUnavailable        the agent of an open turn is gone
    ├── StepLimit               a bound of the turn is reached
    ├── ModelFailed             the model's tries are used up; the turn ends and can be continued
    ├── RecorderError           SinkClosed · RecorderFull · RecorderStopped
    ├── TurnFailed              what a waiting client raises
    └── SetupError              AuthoringError · AppNotImportable · ServerUnreachable · PortTaken

Messages say what was wrong, with which value, and what to do; they never carry prompts, answers,
arguments or SQL parameters, and are cut at 300 characters (DESIGN 5). This module must not import
anything but limits.
"""

from typing import ClassVar, Final

from perdure.contracts.limits import ERROR_CHARS_MAX


class PerdureError(Exception):
    """Base of all our errors. `retryable` says whether the same command may succeed later."""

    code: ClassVar[str] = "perdure_error"
    retryable_by_default: ClassVar[bool] = False

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message[:ERROR_CHARS_MAX])
        self.retryable = self.retryable_by_default if retryable is None else retryable


class RequestError(PerdureError):
    """The request is refused before anything is written."""

    code = "request_refused"


class InvalidRequest(RequestError):
    """The input has the wrong shape: not an object, unknown or missing fields, wrong types."""

    code = "invalid_request"


class InvalidIdentifier(InvalidRequest):
    """An id or a namespace is empty, too long or has characters outside its alphabet (DESIGN 2)."""

    code = "invalid_identifier"


class MessageTooLarge(InvalidRequest):
    """A message is over its limit of encoded bytes."""

    code = "message_too_large"


class MessageBlank(InvalidRequest):
    """A message has no text but white space."""

    code = "message_blank"


class UnknownAgent(RequestError):
    """No agent of that name is registered on the worker."""

    code = "unknown_agent"


class CapabilityDenied(RequestError):
    """A turn asked for tools that its agent does not have."""

    code = "capability_denied"


class AgentUnavailable(PerdureError):
    """The turn is open, and this worker lacks its agent or tools: a deploy took them away."""

    code = "agent_unavailable"


class RequestConflict(RequestError):
    """The same request id was used before with other content (promise P5)."""

    code = "request_conflict"


class NamespaceMismatch(RequestError):
    """The resource belongs to another namespace (seed 1.2 #21)."""

    code = "namespace_mismatch"


class ConversationBusy(RequestError):
    """Another turn holds the conversation; the message names it."""

    code = "conversation_busy"


class SummaryRequired(RequestError):
    """More messages than a window may hold are not covered by a summary."""

    code = "summary_required"


class OwnershipError(PerdureError):
    """Another owner acts for this turn."""

    code = "ownership"


class Fenced(OwnershipError):
    """A newer epoch owns the turn; this one may not write any more."""

    code = "fenced"


class Superseded(OwnershipError):
    """A newer attempt of the same model step has begun; this one stops its stream.

    Tried again: the newer attempt may be a process that was frozen and is of no use any more.
    """

    code = "superseded"
    retryable_by_default = True


class StoreError(PerdureError):
    """Base of what the ledger reports."""

    code = "store"


class StoreUnavailable(StoreError):
    """The database cannot be reached, is locked or lost the connection. Try the command again."""

    code = "store_unavailable"
    retryable_by_default = True


class WrongStore(StoreError):
    """The turn was opened in another ledger than the one this worker uses."""

    code = "wrong_store"
    retryable_by_default = True


class LedgerBehind(StoreError):
    """The ledger lacks facts that the workflow has seen: a restored backup (DESIGN 4)."""

    code = "ledger_behind"


class StoreSchemaNewer(StoreError):
    """The database was written by a newer program; nothing was changed."""

    code = "store_schema_newer"


class StoreSchemaOld(StoreError):
    """The database needs `perdure db upgrade` first."""

    code = "store_schema_old"


class StoreUnreadable(StoreError):
    """The path is not a database this program can open."""

    code = "store_unreadable"


class LedgerRejection(StoreError):
    """The command contradicts the ledger, which is healthy (seed 3.2 #20). `reason` is stable."""

    code = "ledger_rejection"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class LedgerCorruption(StoreError):
    """The ledger is damaged (seed 3.2 #21). `reason` is stable."""

    code = "ledger_corruption"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class CheckpointError(PerdureError):
    """Base of checkpoint errors (seed 1.2 #3)."""

    code = "checkpoint"


class CheckpointConflict(CheckpointError):
    """The stored revision is not the expected one, or the checkpoint exists already."""

    code = "checkpoint_conflict"


class CheckpointMissing(CheckpointError):
    """No checkpoint has that id."""

    code = "checkpoint_missing"


class CheckpointUnsupported(CheckpointError):
    """The checkpoint's kind is unknown here or its schema version is newer than this program."""

    code = "checkpoint_unsupported"


class ConversationError(PerdureError):
    """Base of what the transcript commands refuse."""

    code = "conversation"


class ConversationConflict(ConversationError):
    """The conversation has another version than the caller expected (seed 1.2 #22)."""

    code = "conversation_conflict"


class ConversationMissing(ConversationError):
    """There is no such conversation."""

    code = "conversation_missing"


class ConversationInvalid(ConversationError):
    """The messages cannot be appended: none, or one with the system role."""

    code = "conversation_invalid"


class ModelError(PerdureError):
    """Raised by a model. Retryable unless it says otherwise; `advice` is for who finds it."""

    code = "model_error"
    advice: ClassVar[str] = "ask again later"
    retryable_by_default = True

    def __init__(
        self, message: str, *, retryable: bool | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.retry_after_s = retry_after_s


class ModelUnavailable(ModelError):
    """The provider cannot answer now: overloaded, limited, unreachable."""

    code = "model_unavailable"


class ModelRateLimited(ModelUnavailable):
    """The provider has had enough requests for now; `retry_after_s` is its word, if it gave one."""

    code = "model_rate_limited"


class ModelProtocolError(ModelError):
    """The response breaks the protocol: no final event, or calls announced and missing."""

    code = "model_protocol_error"


class ModelRefused(ModelError):
    """The provider refused the request for good; the classes below say why, where it is known."""

    code = "model_refused"
    advice = "the same request would be refused again"
    retryable_by_default = False


class ModelCredentialsRefused(ModelRefused):
    """The key is missing, wrong, or may not use this model."""

    code = "model_credentials_refused"
    advice = "check the key of its provider, and what it may use"


class ModelUnknown(ModelRefused):
    """The provider has no model of that name."""

    code = "model_unknown"
    advice = "check the agent's model"


class ModelContextOverflow(ModelRefused):
    """The request is longer than the model's context."""

    code = "model_context_overflow"
    advice = "shorten the conversation, or choose a model with a longer context"


class ModelContentRefused(ModelRefused):
    """The provider's policy refused the request or filtered the answer."""

    code = "model_content_refused"
    advice = "say it differently"


class ModelPartUnsupported(ModelRefused):
    """The provider cannot take a kind of part; found before the call."""

    code = "model_part_unsupported"
    advice = "leave the part out, or choose a model that takes it"


class ModelScriptError(ModelError):
    """A scripted model has no reply for this request."""

    code = "model_script_error"
    advice = "add a reply to the script"
    retryable_by_default = False


class ToolError(PerdureError):
    """Raised by a tool to report a failure to the model (DESIGN 5).

    For SAFE and KEYED tools it is tried again first unless `retryable=False`; `retry_after_s` is
    honoured. `told` is the whole message: the model's, while what is logged or raised is cut.
    """

    code = "tool_error"
    retryable_by_default = True

    def __init__(
        self, message: str, *, retryable: bool | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.retry_after_s = retry_after_s
        self.told = message


class StepLimit(PerdureError):
    """The turn used all its model steps (`limits.model_steps_max`)."""

    code = "step_limit"


class ModelFailed(PerdureError):
    """The model reported errors until its tries were used up, or one that no try can mend."""

    code = "model_failed"


class RecorderError(PerdureError):
    """Base of what the recorder of streamed output refuses."""

    code = "recorder"


class SinkClosed(RecorderError):
    """The response has ended or was cancelled; the sink takes nothing more (seed 4.2 #21)."""

    code = "sink_closed"


class RecorderFull(RecorderError):
    """The recorder's queue is full; nothing that it accepted is dropped (seed 4.2 #13)."""

    code = "recorder_full"


class RecorderStopped(RecorderError):
    """The recorder ended after a failure of the store."""

    code = "recorder_stopped"


class TurnFailed(PerdureError):
    """The turn ended `failed`; `stop_reason` says why."""

    code = "turn_failed"

    def __init__(self, stop_reason: str, message: str) -> None:
        super().__init__(f"{stop_reason}: {message}")
        self.stop_reason = stop_reason


class SetupError(PerdureError):
    """The program was set up wrongly."""

    code = "setup"


class AuthoringError(SetupError):
    """An agent, a tool or an app is declared wrongly."""

    code = "authoring"


class AppNotImportable(SetupError):
    """`module:attribute` does not lead to an `App`."""

    code = "app_not_importable"


class ServerUnreachable(SetupError):
    """No Temporal server answers at the address."""

    code = "server_unreachable"


class PortTaken(SetupError):
    """Something already listens on the port."""

    code = "port_taken"


# What no retry of the same activity can mend: the turn ends with it as its stop reason.
LEDGER_FAILURE_CODES: Final = frozenset(
    error.code for error in (LedgerBehind, LedgerCorruption, LedgerRejection)
)
# What a first model step may be refused with before it has written anything (DESIGN 4).
ERROR_CODES_AT_OPENING: Final = frozenset(
    error.code
    for error in (
        InvalidRequest,
        UnknownAgent,
        CapabilityDenied,
        RequestConflict,
        NamespaceMismatch,
        ConversationBusy,
        SummaryRequired,
        AuthoringError,
    )
)
