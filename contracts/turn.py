"""The turn as its callers see it: request and result.

`TurnRequest` is the plain JSON that any service in any language sends, so it refuses unknown
fields. `parse_turn_request` is the only way in: it never lets a value of the input into an error.
"""

import json
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from perdure.contracts.canonical import canonical_json, content_digest, encoded_bytes
from perdure.contracts.errors import (
    InvalidIdentifier,
    InvalidRequest,
    MessageBlank,
    MessageTooLarge,
)
from perdure.contracts.ids import DEFAULT_NAMESPACE, Identifier, Namespace, ToolName, TurnKey
from perdure.contracts.limits import (
    MEDIA_URL_CHARS_MAX,
    MESSAGE_BYTES_MAX,
    MODEL_STEPS_DEFAULT,
    MODEL_STEPS_MAX,
    PARAMETERS_BYTES_MAX,
    TOOLS_PER_TURN_MAX,
)
from perdure.contracts.messages import MediaPart, Message, Role, TextPart, user_message
from perdure.contracts.model import Usage


class TurnStatus(StrEnum):
    """`open`, or one of the three ends (promise P1)."""

    OPEN = "open"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    """Why a turn ended. Codes of errors (`contracts/errors.py`) are stop reasons too."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"
    LENGTH = "length"
    OUTPUT_INVALID = "output_invalid"
    STEP_LIMIT = "step_limit"
    MODEL_FAILED = "model_failed"
    MODEL_LOST = "model_lost"
    TURN_LOST = "turn_lost"
    LEDGER_BEHIND = "ledger_behind"


WHAT_NEXT: Final[dict[str, str]] = {
    StopReason.MODEL_FAILED: (
        "Nothing is lost: mend what the model reported, then send the message as a new request"
    ),
    StopReason.MODEL_LOST: (
        "Workers were lost during every try of the model call: read their logs before you send the "
        "message as a new request"
    ),
    StopReason.TURN_LOST: (
        "Its workflow was closed from outside; the conversation goes on with the next request"
    ),
    StopReason.STEP_LIMIT: "Raise limits.model_steps_max, or ask for less in one turn",
    StopReason.OUTPUT_INVALID: (
        "Relax the agent's output type or choose a stronger model, then send a new request"
    ),
    StopReason.LEDGER_BEHIND: (
        "The ledger lacks what this workflow has seen: was a backup restored, or is a worker "
        "pointed at another database?"
    ),
}


class _FromStrangers(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="forbid")


class TurnLimits(_FromStrangers):
    """Bounds of one turn, pinned when it opens."""

    model_steps_max: int = Field(default=MODEL_STEPS_DEFAULT, ge=1, le=MODEL_STEPS_MAX, strict=True)


class _TextPartIn(_FromStrangers):
    type: Literal["text"] = "text"
    text: str = Field(strict=True)


class _MediaPartIn(_FromStrangers):
    type: Literal["media"]
    url: str = Field(strict=True, pattern=r"^https?://[^\s]+$", max_length=MEDIA_URL_CHARS_MAX)
    media_type: str = Field(strict=True, pattern=r"^[a-z]+/[A-Za-z0-9.+-]+$", max_length=127)


def _kind_of(part: Any) -> str:
    kind = cast("dict[str, Any]", part).get("type", "text") if isinstance(part, dict) else ""
    return kind if isinstance(kind, str) else ""


_PartIn = Annotated[
    Annotated[_TextPartIn, Tag("text")] | Annotated[_MediaPartIn, Tag("media")],
    Discriminator(
        _kind_of,
        custom_error_type="part_unknown",
        # The kind that was sent is the caller's text, so it is not named.
        custom_error_message="a part is an object whose type is 'text' or 'media'",
    ),
]


class _MessageIn(_FromStrangers):
    role: str = Field(default="user", pattern="^user$")
    parts: tuple[_PartIn, ...] = Field(min_length=1, max_length=256)


def _part(part: _TextPartIn | _MediaPartIn) -> TextPart | MediaPart:
    if isinstance(part, _TextPartIn):
        return TextPart(text=part.text)
    return MediaPart(url=part.url, media_type=part.media_type)


class TurnRequest(_FromStrangers):
    """One submission. `message` is a string or `{"parts": [...]}` with parts like
    `{"type": "text", "text": ...}` and `{"type": "media", "url": ..., "media_type": ...}`.

    `tools` may narrow the agent's tools, never widen them; None means all. `parameters` are model
    settings of this turn, laid over the agent's.
    """

    agent: Identifier
    conversation_id: Identifier
    request_id: Identifier
    message: Message
    namespace: Namespace = DEFAULT_NAMESPACE
    tools: tuple[ToolName, ...] | None = Field(default=None, max_length=TOOLS_PER_TURN_MAX)
    limits: TurnLimits = TurnLimits()
    parameters: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        size = encoded_bytes(value)
        if size > PARAMETERS_BYTES_MAX:
            raise PydanticCustomError(
                "parameters_too_large",
                "has {size} encoded bytes, at most {limit} fit",
                {"size": size, "limit": PARAMETERS_BYTES_MAX},
            )
        return value

    @field_validator("message", mode="before")
    @classmethod
    def _read_message(cls, value: Any) -> Any:
        if isinstance(value, Message):
            return value
        if isinstance(value, str):
            return user_message(value)
        parsed = _MessageIn.model_validate(value)
        return Message(role=Role.USER, parts=tuple(_part(part) for part in parsed.parts))

    @field_validator("message")
    @classmethod
    def _check_message(cls, value: Message) -> Message:
        size = encoded_bytes(value.model_dump(mode="json"))
        if size > MESSAGE_BYTES_MAX:
            raise PydanticCustomError(
                "message_too_large",
                "has {size} encoded bytes, at most {limit} fit",
                {"size": size, "limit": MESSAGE_BYTES_MAX},
            )
        if not (value.text.strip() or any(isinstance(part, MediaPart) for part in value.parts)):
            raise PydanticCustomError("message_blank", "has no text but white space")
        return value

    @field_validator("tools")
    @classmethod
    def _sort_tools(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else tuple(sorted(set(value)))

    @property
    def key(self) -> TurnKey:
        """The turn's identity."""
        return TurnKey(
            namespace=self.namespace,
            conversation_id=self.conversation_id,
            request_id=self.request_id,
        )

    def as_input(self) -> dict[str, Any]:
        """The request as plain JSON that is short and reads back as the same request."""
        encoded = self.model_dump(mode="json", exclude_defaults=True)
        if self.message == user_message(self.message.text):
            encoded["message"] = self.message.text
        else:
            # A part is told by its `type`, which is a default and would be left out.
            parts = [part.model_dump(mode="json") for part in self.message.parts]
            encoded["message"] = {"parts": parts}
        return encoded

    @property
    def digest(self) -> str:
        """Digest of the whole content: the same request id with another digest is a conflict."""
        content = self.model_dump(mode="json")
        if not self.parameters:
            # A field that came later: a request without it keeps the digest it always had.
            del content["parameters"]
        return content_digest(canonical_json(content))


class TurnResult(BaseModel):
    """What a turn came to, as every caller gets it.

    `answer` is at most 16 KiB of encoded JSON (`answer_cut` says if it was cut) and None where
    previews are off; `answer_at` then says where the whole answer is. `output` is the validated
    JSON of an agent with an output type, unless the answer is cut.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    turn_id: str = ""
    status: TurnStatus
    stop_reason: str
    answer: str | None = None
    answer_cut: bool = False
    answer_at: str | None = None
    output: JsonValue = None
    usage: Usage = Usage()
    conversation_version: int = 0
    request_digest: str = ""


_ERRORS = {
    "invalid_identifier": InvalidIdentifier,
    "message_too_large": MessageTooLarge,
    "message_blank": MessageBlank,
}


def parse_turn_request(value: Any) -> TurnRequest:
    """Validate a caller's input.

    Raises InvalidRequest or one of its subclasses; the message names fields, never their values.
    """
    if isinstance(value, TurnRequest):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(f"the input must be a JSON object, not {_json_type(value)}")
    try:
        return TurnRequest.model_validate(value)
    except ValidationError as error:
        raise _as_request_error(error) from None
    except (ValueError, RecursionError):
        raise InvalidRequest("the input cannot be encoded as JSON") from None


def _as_request_error(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    unknown = [item for item in problems if item["type"] == "extra_forbidden"]
    if unknown:
        # The name of an unknown field is the caller's text: only count, and list what is known.
        fields = ", ".join(TurnRequest.model_fields)
        return InvalidRequest(f"{len(unknown)} unknown field(s); the input may have: {fields}")
    where = ".".join(str(item) for item in first["loc"] if item in TurnRequest.model_fields)
    return _ERRORS.get(first["type"], InvalidRequest)(f"{where or 'input'}: {first['msg']}")


def _json_type(value: Any) -> str:
    for kind, name in ((bool, "a boolean"), (str, "a string"), (list, "an array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "a number"


def cut_text(text: str, bytes_max: int) -> tuple[str, bool]:
    """The longest head of the text whose encoded JSON fits, and whether anything was cut off."""
    # No character takes more than twelve bytes, and two quotes stand around the text.
    if len(text) * 12 + 2 <= bytes_max or len(json.dumps(text)) <= bytes_max:
        return text, False
    low, high = 0, min(len(text), bytes_max)
    while low < high:
        middle = (low + high + 1) // 2
        if len(json.dumps(text[:middle])) <= bytes_max:
            low = middle
        else:
            high = middle - 1
    return text[:low], True
