"""A prepared request in the words of pydantic-ai.

What a provider made for itself (signatures, ids) goes back to that provider only. Pure.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final

from pydantic_ai import messages as pai
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.tools import ToolDefinition

from perdure.contracts.canonical import canonical_json
from perdure.contracts.messages import (
    MediaPart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from perdure.contracts.model import ModelRequest

# One that says itself what a call's id may be; the others take an operation id as it is.
_SHORT_IDS: Final = "mistral"
_SHORT_ID_CHARS: Final = 9
# What a schema is called where it needs a name.
_ANSWER: Final = "answer"


class Speaker:
    """Who is asked: `origin` is what stands before the colon of the model's name, `system` and
    `base_url` are the client's own words for it.
    """

    def __init__(self, origin: str, system: str, base_url: str | None) -> None:
        self.origin = origin
        self.system = system
        self.base_url = base_url

    def call_id(self, call_id: str) -> str:
        """Our id of a call as this provider takes it."""
        if self.system != _SHORT_IDS:
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]

    def made(self, data: dict[str, Any] | None) -> dict[str, Any]:
        """What this provider wants back of a part; empty for a part of another one."""
        return data if data is not None and data.get("origin") == self.origin else {}


def to_messages(
    request: ModelRequest, speaker: Speaker, *, enforces_schemas: bool
) -> list[pai.ModelMessage]:
    """The whole context, each result right after its call."""
    sent: list[pai.ModelMessage] = []
    for message in request.messages:
        if message.role is Role.ASSISTANT:
            response = _response(message, speaker)
            if response.parts:
                sent.append(response)
        else:
            parts = _request_parts(message, speaker)
            if sent and isinstance(sent[-1], pai.ModelRequest):
                sent[-1].parts = [*sent[-1].parts, *parts]
            elif parts:
                sent.append(pai.ModelRequest(parts=parts))
    instructions = _instructions(request, enforces_schemas)
    if instructions and sent and isinstance(sent[-1], pai.ModelRequest):
        sent[-1].instructions = instructions
    return sent


def to_parameters(request: ModelRequest, *, enforces_schemas: bool) -> ModelRequestParameters:
    """The tools, and the schema of the answer where the model's provider enforces one."""
    tools = [
        ToolDefinition(
            name=spec.name,
            description=spec.description or None,
            parameters_json_schema=spec.parameters,
        )
        for spec in request.tools
    ]
    if request.output_schema is None or not enforces_schemas:
        return ModelRequestParameters(function_tools=tools)
    answer = OutputObjectDefinition(json_schema=request.output_schema, name=_ANSWER)
    return ModelRequestParameters(
        function_tools=tools, output_mode="native", output_object=answer, allow_text_output=True
    )


def _instructions(request: ModelRequest, enforces_schemas: bool) -> str:
    if request.output_schema is None or enforces_schemas:
        return request.instructions
    schema = canonical_json(request.output_schema)
    asked = f"Give your final answer as one JSON object, without other text. Its schema: {schema}"
    return f"{request.instructions}\n\n{asked}" if request.instructions else asked


def _request_parts(message: Message, speaker: Speaker) -> list[pai.ModelRequestPart]:
    parts: list[pai.ModelRequestPart] = [
        pai.ToolReturnPart(
            tool_name=part.name,
            content=part.text,
            tool_call_id=speaker.call_id(part.call_id),
            outcome="failed" if part.is_error else "success",
        )
        for part in message.parts
        if isinstance(part, ToolResultPart)
    ]
    if message.role is Role.SYSTEM:
        parts.append(pai.SystemPromptPart(content=message.text))
        return parts
    said = list(_user_content(message.parts))
    if len(said) == 1 and isinstance(said[0], str):
        parts.append(pai.UserPromptPart(content=said[0]))
    elif said:
        parts.append(pai.UserPromptPart(content=said))
    return parts


def _user_content(parts: Iterable[Part]) -> Iterable[pai.UserContent]:
    for part in parts:
        if isinstance(part, TextPart) and part.text:
            yield part.text
        elif isinstance(part, MediaPart):
            yield _media(part)


def _media(part: MediaPart) -> pai.UserContent:
    kind = part.media_type.partition("/")[0]
    if kind == "image":
        return pai.ImageUrl(url=part.url, media_type=part.media_type)
    if kind == "audio":
        return pai.AudioUrl(url=part.url, media_type=part.media_type)
    if kind == "video":
        return pai.VideoUrl(url=part.url, media_type=part.media_type)
    return pai.DocumentUrl(url=part.url, media_type=part.media_type)


def _response(message: Message, speaker: Speaker) -> pai.ModelResponse:
    parts: list[pai.ModelResponsePart] = []
    text_after: dict[str, Any] = {}
    for part in message.parts:
        match part:
            case TextPart() if part.text:
                parts.append(pai.TextPart(part.text, **_identity(text_after, speaker)))
            case ThinkingPart() if made := speaker.made(part.provider_data):
                parts.append(_thinking(part, made, speaker))
            case ToolCallPart():
                parts.append(_call(part, speaker))
            case _:
                pass
        made = speaker.made(part.provider_data) if isinstance(part, ThinkingPart) else {}
        text_after = made.get("text_after") or {}
    own = any(getattr(part, "provider_name", None) for part in parts)
    return pai.ModelResponse(
        parts=parts,
        provider_name=speaker.system if own else None,
        provider_url=speaker.base_url if own else None,
    )


def _thinking(part: ThinkingPart, made: dict[str, Any], speaker: Speaker) -> pai.ThinkingPart:
    identity = _identity(made, speaker)
    return pai.ThinkingPart(part.text, signature=made.get("signature"), **identity)


def _call(part: ToolCallPart, speaker: Speaker) -> pai.ToolCallPart:
    return pai.ToolCallPart(
        tool_name=part.name,
        args=part.arguments,
        tool_call_id=speaker.call_id(part.call_id),
        **_identity(speaker.made(part.provider_data), speaker),
    )


def _identity(made: dict[str, Any], speaker: Speaker) -> dict[str, Any]:
    if not made:
        return {}
    return {
        "id": made.get("id"),
        "provider_details": made.get("details"),
        "provider_name": speaker.system,
    }
