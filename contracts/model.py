"""What crosses between us and a model: request, response, stream events, the sink.

A model is anything with `respond(request, sink)`. The stream events are for models that stream;
`assemble` folds them into a response and refuses a stream without its final event (seed 1.2 #41).
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from perdure.contracts.errors import ModelProtocolError
from perdure.contracts.messages import Message, Part, TextPart, ThinkingPart, ToolCallPart
from perdure.contracts.tools import ToolSpec


class FinishReason(StrEnum):
    """Why the model stopped."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"


class Usage(BaseModel):
    """Tokens of one or more calls; cached input tokens are counted apart."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    input_tokens: int = Field(default=0, ge=0)
    output_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )


class ModelRequest(BaseModel):
    """One prepared request. A retry of the same step gets an equal one but for `attempt`.

    `output_schema` is the JSON schema that the final answer's text has to fit, None for free text.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    agent: str
    model: str
    instructions: str = ""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    output_schema: dict[str, Any] | None = None
    namespace: str = "default"
    conversation_id: str = ""
    turn_id: str = ""
    step: int = 1
    attempt: int = 1


class ModelResponse(BaseModel):
    """A whole answer. Calls without an id or with a repeated one are allowed."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    parts: tuple[Part, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage = Usage()
    model: str = ""
    response_id: str = ""
    provider_metadata: dict[str, Any] = Field(default_factory=dict)


class _StreamEvent(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")


class ResponseStarted(_StreamEvent):
    """The provider accepted the request."""

    type: Literal["response_started"] = "response_started"
    id: str = ""
    model: str = ""


class TextDelta(_StreamEvent):
    """A piece of the answer's text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(_StreamEvent):
    """A piece of the reasoning."""

    type: Literal["thinking_delta"] = "thinking_delta"
    text: str


class ContentPartCompleted(_StreamEvent):
    """A whole part; it replaces the deltas that were streamed for its index."""

    type: Literal["content_part_completed"] = "content_part_completed"
    index: int
    part: Part


class ResponseCompleted(_StreamEvent):
    """The final event: without it there is no response."""

    type: Literal["response_completed"] = "response_completed"
    finish_reason: FinishReason
    usage: Usage = Usage()
    provider_metadata: dict[str, Any] = Field(default_factory=dict)


StreamEvent = Annotated[
    ResponseStarted | TextDelta | ThinkingDelta | ContentPartCompleted | ResponseCompleted,
    Field(discriminator="type"),
]


@runtime_checkable
class ModelSink(Protocol):
    """Takes what streams. Each call returns when the delta is accepted, in order.

    Raises SinkClosed after the response ended or was cancelled, RecorderStopped after a failure of
    the store.
    """

    async def text(self, delta: str) -> None:
        """Take a piece of the answer."""
        ...

    async def thinking(self, delta: str) -> None:
        """Take a piece of the reasoning."""
        ...


@runtime_checkable
class Model(Protocol):
    """What `Agent(model=...)` takes beside a string. `name` is optional and recorded."""

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Answer, streaming into the sink. Raise ModelError for what the provider reports."""
        ...


def assemble(events: Iterable[StreamEvent]) -> ModelResponse:
    """Fold a finished stream into a response.

    Raises ModelProtocolError if the final event is missing, if something follows it, or if the
    stream announces tool calls and has none.
    """
    started, final = ResponseStarted(), None
    completed: dict[int, Part] = {}
    text: list[str] = []
    thinking: list[str] = []
    for event in events:
        if final is not None:
            raise ModelProtocolError("the stream goes on after its final event")
        match event:
            case ResponseStarted():
                started = event
            case TextDelta():
                text.append(event.text)
            case ThinkingDelta():
                thinking.append(event.text)
            case ContentPartCompleted():
                completed[event.index] = event.part
            case ResponseCompleted():
                final = event
    if final is None:
        raise ModelProtocolError("the stream ended without its final event; the answer is not kept")
    parts = tuple(completed[index] for index in sorted(completed))
    parts = _with_streamed(parts, "".join(thinking), "".join(text))
    if final.finish_reason is FinishReason.TOOL_CALLS and not _has_call(parts):
        raise ModelProtocolError("the stream announces tool calls and has none")
    return ModelResponse(
        parts=parts,
        finish_reason=final.finish_reason,
        usage=final.usage,
        model=started.model,
        response_id=started.id,
        provider_metadata=final.provider_metadata,
    )


def _with_streamed(parts: tuple[Part, ...], thinking: str, text: str) -> tuple[Part, ...]:
    # Deltas whose whole part never came are kept as parts of their own.
    if text and not any(isinstance(part, TextPart) for part in parts):
        parts = (TextPart(text=text), *parts)
    if thinking and not any(isinstance(part, ThinkingPart) for part in parts):
        parts = (ThinkingPart(text=thinking), *parts)
    return parts


def _has_call(parts: tuple[Part, ...]) -> bool:
    return any(isinstance(part, ToolCallPart) for part in parts)
