"""Messages and their parts, as the transcript keeps them and a model is sent them.

A part is told by its `type`; new kinds can be added. Nothing here is specific to a provider: opaque
data of a provider is kept in `provider_data` and sent back unchanged.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Role(StrEnum):
    """Who speaks. Instructions are never stored; a tool's results have a role of their own."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class MessageKind(StrEnum):
    """`marker` is the note that a failed or cancelled turn leaves for the next one (DESIGN 4).

    `repair` tells the model, in the turn itself, why its structured answer could not be used.
    """

    NORMAL = "normal"
    MARKER = "marker"
    REPAIR = "repair"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")


class TextPart(_Part):
    """Plain text."""

    type: Literal["text"] = "text"
    text: str


class MediaPart(_Part):
    """An image or a file that the provider fetches itself, by `http(s)` URL and media type."""

    type: Literal["media"] = "media"
    url: str
    media_type: str


class ThinkingPart(_Part):
    """A model's reasoning, with the opaque data that its provider wants back."""

    type: Literal["thinking"] = "thinking"
    text: str = ""
    provider_data: dict[str, Any] | None = None


class ToolCallPart(_Part):
    """A call the model asked for.

    `call_id` is ours (the operation id, once stored), `provider_call_id` the provider's attribute.
    `arguments_text` keeps the raw text where it was no JSON object; `arguments` is then empty, so
    that a stored call can always be sent to a provider again.
    """

    type: Literal["tool_call"] = "tool_call"
    call_id: str = ""
    provider_call_id: str = ""
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    arguments_text: str | None = None
    provider_data: dict[str, Any] | None = None


class ToolResultPart(_Part):
    """The one result of a call (promise P4), as text for the model.

    `flags` says what was done to the text: `sanitised`, `cut`, `not_json`. `structured` is what
    the tool gave beside the text, for programs; no model is sent it.
    """

    type: Literal["tool_result"] = "tool_result"
    call_id: str
    name: str
    text: str
    is_error: bool = False
    flags: tuple[str, ...] = ()
    structured: JsonValue = None


Part = Annotated[
    TextPart | MediaPart | ThinkingPart | ToolCallPart | ToolResultPart, Field(discriminator="type")
]


class Message(BaseModel):
    """One message of a transcript."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    role: Role
    parts: tuple[Part, ...] = ()
    kind: MessageKind = MessageKind.NORMAL

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def calls(self) -> tuple[ToolCallPart, ...]:
        """The calls, in call order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallPart))

    @property
    def results(self) -> tuple[ToolResultPart, ...]:
        """The tool results, in call order."""
        return tuple(part for part in self.parts if isinstance(part, ToolResultPart))


def user_message(text: str, kind: MessageKind = MessageKind.NORMAL) -> Message:
    """A user's message of one text part."""
    return Message(role=Role.USER, parts=(TextPart(text=text),), kind=kind)


def assistant_message(text: str) -> Message:
    """An assistant's message of one text part."""
    return Message(role=Role.ASSISTANT, parts=(TextPart(text=text),))
