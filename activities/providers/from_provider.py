"""A provider's whole answer in our words, or the error that it is.

Nothing is repaired here: arguments that are no JSON object stay text, an unknown tool stays a call,
and the engine answers both. Pure.
"""

import json
from typing import Any, Final, cast

from pydantic_ai import messages as pai
from pydantic_ai.usage import RequestUsage
from pydantic_core import to_jsonable_python

from perdure.contracts.errors import ModelContentRefused, ModelProtocolError, ModelUnavailable
from perdure.contracts.messages import Part, TextPart, ThinkingPart, ToolCallPart
from perdure.contracts.model import FinishReason, ModelResponse, Usage

# Its client leaves out the raw reason and never makes one up.
_WITHOUT_RAW_REASON: Final = ("xai",)
# What the client library calls an id that it made up itself.
_MADE_UP_ID: Final = "pyd_ai_"


def read_response(answer: pai.ModelResponse, origin: str) -> ModelResponse:
    """The answer.

    Raises ModelProtocolError for one that was cut, ModelContentRefused for one that was filtered,
    ModelUnavailable where the provider ended it with an error.
    """
    raw_reason = (answer.provider_details or {}).get("finish_reason")
    if answer.finish_reason == "content_filter":
        raise ModelContentRefused("the provider filtered the answer")
    if answer.finish_reason == "error":
        raise ModelUnavailable("the provider ended its answer with an error")
    told = bool(raw_reason) or answer.provider_name in _WITHOUT_RAW_REASON
    if answer.finish_reason is None or not told or answer.state != "complete":
        # The client library takes a missing reason for "stop", so the raw one is asked for.
        raise ModelProtocolError("the stream ended without its finish reason")
    parts = _parts(answer.parts, origin)
    return ModelResponse(
        parts=parts,
        finish_reason=_finish_reason(answer.finish_reason, parts),
        usage=read_usage(answer.usage),
        model=answer.model_name or "",
        response_id=answer.provider_response_id or "",
        provider_metadata={"origin": origin, "finish_reason": str(raw_reason or "")},
    )


def read_usage(usage: RequestUsage) -> Usage:
    """The tokens, each counted once: `input_tokens` are those that were not read from a cache."""
    cached = max(usage.cache_read_tokens, 0)
    return Usage(
        input_tokens=max(usage.input_tokens - cached, 0),
        output_tokens=max(usage.output_tokens, 0),
        cached_tokens=cached,
    )


def _finish_reason(reason: str, parts: tuple[Part, ...]) -> FinishReason:
    if reason == "length":
        return FinishReason.LENGTH
    called = any(isinstance(part, ToolCallPart) for part in parts)
    return FinishReason.TOOL_CALLS if called or reason == "tool_call" else FinishReason.STOP


def _parts(parts: Any, origin: str) -> tuple[Part, ...]:
    read: list[Part] = []
    for part in cast("list[pai.ModelResponsePart]", parts):
        match part:
            case pai.TextPart():
                _note_identity(read, _made(part, origin))
                if part.content:
                    read.append(TextPart(text=part.content))
            case pai.ThinkingPart():
                made = _made(part, origin)
                if part.content or made:
                    read.append(ThinkingPart(text=part.content, provider_data=made))
            case pai.ToolCallPart():
                read.append(_call(part, origin))
            case _:
                # What a provider's own tools leave behind: none is offered to it.
                pass
    return tuple(read)


def _note_identity(read: list[Part], made: dict[str, Any] | None) -> None:
    # A text has no place for what its provider wants back; it is kept by the thinking before it,
    # which is the only reason why a provider asks for it.
    if made is not None and read and isinstance(read[-1], ThinkingPart):
        data = {**(read[-1].provider_data or {"origin": made["origin"]}), "text_after": made}
        read[-1] = read[-1].model_copy(update={"provider_data": data})


def _made(
    part: pai.TextPart | pai.ThinkingPart | pai.ToolCallPart, origin: str
) -> dict[str, Any] | None:
    found = {
        "id": part.id,
        "signature": part.signature if isinstance(part, pai.ThinkingPart) else None,
        "details": part.provider_details,
    }
    kept = {name: value for name, value in found.items() if value}
    return cast("dict[str, Any]", to_jsonable_python({"origin": origin} | kept)) if kept else None


def _call(part: pai.ToolCallPart, origin: str) -> ToolCallPart:
    arguments, text = _arguments(part.args)
    made_up = part.tool_call_id.startswith(_MADE_UP_ID)
    return ToolCallPart(
        provider_call_id="" if made_up else part.tool_call_id,
        name=part.tool_name,
        arguments=arguments,
        arguments_text=text,
        provider_data=_made(part, origin),
    )


def _arguments(args: str | dict[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    if not isinstance(args, str):
        return args or {}, None
    try:
        value: Any = json.loads(args) if args.strip() else {}
    except (ValueError, RecursionError):
        return {}, args
    return (cast("dict[str, Any]", value), None) if isinstance(value, dict) else ({}, args)
