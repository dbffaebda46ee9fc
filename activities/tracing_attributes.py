"""Attributes of spans: names of the GenAI semantic conventions, copied, and how they are filled.

The conventions are still in development, so the names are constants here and no library's. Content
- messages, instructions, arguments, results - is added only where `content` is on, cut by part.
"""

import json
from typing import Any, Final

from perdure.activities.telemetry import ModelCall, ToolRun
from perdure.contracts.canonical import sanitise_text
from perdure.contracts.messages import (
    MediaPart,
    Message,
    Part,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from perdure.stores.measured import EndedTurn

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
AGENT_NAME: Final = "gen_ai.agent.name"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
INSTRUCTIONS: Final = "gen_ai.system_instructions"
ERROR_TYPE: Final = "error.type"

TURN_ID: Final = "perdure.turn.id"
NAMESPACE: Final = "perdure.namespace"
STEP: Final = "perdure.step"
ATTEMPT: Final = "perdure.attempt"
GENERATION: Final = "perdure.tool.generation"
SAFETY: Final = "perdure.tool.replay_safety"
STATUS: Final = "perdure.tool.status"
TURN_STATUS: Final = "perdure.turn.status"
STOP_REASON: Final = "perdure.turn.stop_reason"
RECOVERY: Final = "perdure.recovery"
STEPS: Final = "perdure.turn.steps"

Attributes = dict[str, Any]

CONTENT_CHARS_MAX: Final = 8192
CONTENT_MESSAGES_MAX: Final = 64

# The conventions' names for providers that model strings call otherwise.
_PROVIDERS: Final = {
    "google": "gcp.gemini",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "bedrock": "aws.bedrock",
    "azure": "azure.ai.openai",
    "mistral": "mistral_ai",
    "grok": "x_ai",
    "openai-chat": "openai",
    "openai-responses": "openai",
}
_FINISH: Final = {"tool_calls": "tool_call"}


def attributes_of_model(call: ModelCall, content: bool) -> Attributes:
    """What is known of a model call before its answer."""
    request = call.request
    found: Attributes = {
        OPERATION_NAME: "chat",
        PROVIDER_NAME: _provider_of(request.model),
        REQUEST_MODEL: request.model.partition(":")[2] or request.model,
        CONVERSATION_ID: request.conversation_id,
        AGENT_NAME: request.agent,
        TURN_ID: request.turn_id,
        NAMESPACE: request.namespace,
        STEP: request.step,
        ATTEMPT: request.attempt,
    }
    if content:
        newest = request.messages[-CONTENT_MESSAGES_MAX:]
        found[INPUT_MESSAGES] = json.dumps([_message(message) for message in newest])
        instructions = [{"type": "text", "content": _cut(request.instructions)}]
        found[INSTRUCTIONS] = json.dumps(instructions)
    return found


def attributes_of_response(call: ModelCall, content: bool) -> Attributes:
    """What the answer says of itself; nothing where there is none."""
    response = call.response
    if response is None:
        return {}
    found: Attributes = {
        FINISH_REASONS: (response.finish_reason.value,),
        INPUT_TOKENS: response.usage.input_tokens,
        OUTPUT_TOKENS: response.usage.output_tokens,
        CACHED_TOKENS: response.usage.cached_tokens,
    }
    if response.model:
        found[RESPONSE_MODEL] = _cut(response.model)
    if response.response_id:
        found[RESPONSE_ID] = _cut(response.response_id)
    if content:
        finish = response.finish_reason.value
        parts = [_part(part) for part in response.parts]
        said = {"role": "assistant", "parts": parts, "finish_reason": _FINISH.get(finish, finish)}
        found[OUTPUT_MESSAGES] = json.dumps([said])
    return found


def attributes_of_tool(run: ToolRun, content: bool) -> Attributes:
    """What is known of an execution before it ends."""
    called = run.called
    found: Attributes = {
        OPERATION_NAME: "execute_tool",
        TOOL_NAME: called.tool,
        TOOL_TYPE: "function",
        TOOL_CALL_ID: called.operation_id,
        CONVERSATION_ID: called.conversation_id,
        AGENT_NAME: run.agent,
        TURN_ID: called.turn_id,
        NAMESPACE: called.namespace,
        STEP: called.step,
        GENERATION: run.generation,
        SAFETY: run.safety.value,
    }
    if content:
        found[TOOL_ARGUMENTS] = _cut(json.dumps(called.arguments))
    return found


def attributes_of_result(run: ToolRun, content: bool) -> Attributes:
    """What the execution came to."""
    found: Attributes = {STATUS: run.status}
    if content and run.outcome is not None:
        found[TOOL_RESULT] = _cut(run.outcome.text)
    return found


def attributes_of_turn(turn: EndedTurn) -> Attributes:
    """What the ledger says of an ended turn."""
    return {
        OPERATION_NAME: "invoke_agent",
        AGENT_NAME: turn.agent,
        CONVERSATION_ID: turn.conversation_id,
        INPUT_TOKENS: turn.usage.input_tokens,
        OUTPUT_TOKENS: turn.usage.output_tokens,
        CACHED_TOKENS: turn.usage.cached_tokens,
        TURN_ID: turn.turn_id,
        NAMESPACE: turn.namespace,
        TURN_STATUS: turn.status.value,
        STOP_REASON: turn.stop_reason,
        STEPS: turn.steps,
    }


def _provider_of(model: str) -> str:
    provider, colon, _ = model.partition(":")
    return _PROVIDERS.get(provider, provider) if colon else "custom"


def _message(message: Message) -> dict[str, Any]:
    return {"role": message.role.value, "parts": [_part(part) for part in message.parts]}


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "content": _cut(part.text)}
    if isinstance(part, ThinkingPart):
        return {"type": "reasoning", "content": _cut(part.text)}
    if isinstance(part, MediaPart):
        return {"type": "uri", "uri": part.url, "mime_type": part.media_type}
    if isinstance(part, ToolCallPart):
        arguments = _cut(json.dumps(part.arguments))
        call_id = part.call_id or part.provider_call_id
        return {"type": "tool_call", "id": call_id, "name": part.name, "arguments": arguments}
    return {"type": "tool_call_response", "id": part.call_id, "response": _cut(part.text)}


def _cut(text: str) -> str:
    # A text that is no UTF-8 would cost the whole batch that it is sent with.
    return sanitise_text(text[:CONTENT_CHARS_MAX])
