"""Tool calls for a model that has none: a chat request with tools in words that it understands.

A model of 135 million parameters writes prose where a call is due. Its runtime can hold it to a
JSON schema, so it is asked for `{"tool": ..., "arguments": ...}` or `{"answer": ...}`, and that
object becomes a call of the OpenAI protocol. Pure: this module must not send or read anything.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

# What of a request is the model's own business; the rest is the protocol's, or about tools.
_PASSED_ON: Final = (
    *("temperature", "seed", "max_tokens", "max_completion_tokens", "top_p", "stop"),
    *("frequency_penalty", "presence_penalty", "response_format"),
)
# A small model copies an example word by word, so this one must be sayable.
_EXAMPLE_ANSWER: Final = "How can I help you?"
_ANSWER_CHARS_MAX: Final = 400
_FILLINGS: Final[Mapping[str, Any]] = {"integer": 0, "number": 0, "boolean": False, "array": []}

Json = dict[str, Any]

_NO_PARAMETERS: Final[Json] = {"type": "object", "properties": {}}
_ANSWER_SCHEMA: Final[Json] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": _ANSWER_CHARS_MAX}},
    "required": ["answer"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Asked:
    """What the model's runtime is sent; `chooses` if its answer is a JSON object of ours."""

    body: Json
    chooses: bool


@dataclass(frozen=True)
class _Function:
    name: str
    description: str
    parameters: Json

    def example(self) -> Json:
        """Arguments of the right types, for the model to copy."""
        properties: Json = self.parameters.get("properties") or {}
        return {name: _filling(field) for name, field in properties.items()}

    def schema(self) -> Json:
        """The choice of this tool."""
        # Nothing may stand beside its two fields.
        return {
            "type": "object",
            "properties": {"tool": {"const": self.name}, "arguments": self.parameters},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }


def ask(request: Mapping[str, Any]) -> Asked:
    """The request for the runtime.

    Tools are offered until there is a result: this model, offered them again, would call for ever.
    Raises ValueError for what is no chat request.
    """
    messages = _objects(request.get("messages"), "messages")
    if not messages:
        raise ValueError("messages must not be empty")
    told = _plain(messages)
    tools = _functions(request) if messages[-1].get("role") != "tool" else []
    body: Json = {name: request[name] for name in _PASSED_ON if request.get(name) is not None}
    if not tools:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return Asked(body | {"messages": told} | streamed, chooses=False)
    schema = {"anyOf": [*(tool.schema() for tool in tools), _ANSWER_SCHEMA]}
    body["messages"] = _with_tools(told, tools)
    body["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "choice", "strict": True, "schema": schema},
    }
    return Asked(body, chooses=True)


def read_choice(answer: Mapping[str, Any]) -> tuple[Json, str]:
    """The message, in the OpenAI protocol, that a choice stands for, and its finish reason.

    An object that was cut at its token limit stays text, with the reason that it came with.
    """
    first = _objects(answer.get("choices"), "choices")[0]
    text = str(first["message"].get("content") or "")
    reason = str(first.get("finish_reason") or "stop")
    try:
        chosen: Any = json.loads(text)
    except ValueError:
        return {"role": "assistant", "content": text}, reason
    if isinstance(chosen, dict) and "tool" in chosen:
        choice = cast("Json", chosen)
        function = {"name": choice["tool"], "arguments": json.dumps(choice.get("arguments") or {})}
        call = {"id": f"call_{answer.get('id', '')}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    said = cast("Json", chosen).get("answer", text) if isinstance(chosen, dict) else text
    return {"role": "assistant", "content": str(said)}, reason


def as_stream(answer: Mapping[str, Any], message: Json, reason: str) -> list[Json]:
    """A whole message as the chunks of a stream, its usage last."""
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
    head: Json = {name: answer.get(name) for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    return [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        head | {"choices": [], "usage": answer.get("usage")},
    ]


def _plain(messages: list[Json]) -> list[Json]:
    """System, user and assistant texts; a result stands before the question it belongs to.

    The model's template knows no tools, and it answers best from facts that it reads first.
    """
    told: list[Json] = []
    for message in messages:
        role, text = message.get("role"), _text(message.get("content"))
        if role == "tool":
            asked = next((kept for kept in reversed(told) if kept["role"] == "user"), None)
            if asked is None:
                asked = {"role": "user", "content": ""}
                told.append(asked)
            asked["content"] = f"{text}\n\n{asked['content']}".strip()
        elif role in ("system", "user", "assistant") and text:
            told.append({"role": role, "content": text})
    return told


def _with_tools(told: list[Json], tools: list[_Function]) -> list[Json]:
    lines = ["Answer with one JSON object. To use a tool:"]
    for tool in tools:
        example = {"tool": tool.name, "arguments": tool.example()}
        lines.append(f"{tool.name}: {tool.description} {json.dumps(example)}")
    lines.append(f"Without a tool: {json.dumps({'answer': _EXAMPLE_ANSWER})}")
    system = "\n\n".join([*(m["content"] for m in told if m["role"] == "system"), "\n".join(lines)])
    return [{"role": "system", "content": system}, *(m for m in told if m["role"] != "system")]


def _functions(request: Mapping[str, Any]) -> list[_Function]:
    if request.get("tool_choice") == "none":
        return []
    return [_function(tool) for tool in _objects(request.get("tools") or [], "tools")]


def _function(tool: Json) -> _Function:
    function = _object(tool.get("function"), "function")
    if not isinstance(function.get("name"), str):
        raise ValueError("a function must have a name")
    described = str(function.get("description") or "").partition("\n")[0]
    parameters = _object(function.get("parameters") or _NO_PARAMETERS, "parameters")
    _object(parameters.get("properties") or {}, "properties")
    return _Function(function["name"], described, parameters)


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = _objects(cast("Any", content), "content")
        return "".join(str(part.get("text") or "") for part in parts)
    return content if isinstance(content, str) else ""


def _filling(field: Any) -> Any:
    kind = str(cast("Json", field).get("type")) if isinstance(field, dict) else ""
    return {} if kind == "object" else _FILLINGS.get(kind, "")


def _object(value: Any, name: str) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return cast("Json", value)


def _objects(value: Any, name: str) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return [_object(item, name) for item in cast("list[Any]", value)]
