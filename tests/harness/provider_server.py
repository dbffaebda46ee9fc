"""A tiny HTTP server that answers as it is told, and the recorded shapes of providers' streams."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from perdure.agents import Endpoint
from perdure.contracts.messages import Message, user_message
from perdure.contracts.model import ModelRequest


@dataclass(frozen=True)
class Reply:
    """One answer. With `cut` the connection is closed in the middle of the last chunk."""

    body: bytes = b""
    status: int = 200
    content_type: str = "text/event-stream"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    path: str
    headers: dict[str, str]
    body: Any


class CannedServer:
    """`async with CannedServer(reply, ...) as server:`; the last reply repeats."""

    def __init__(self, *replies: Reply | bytes) -> None:
        self.asked: list[Asked] = []
        self._replies = [item if isinstance(item, Reply) else Reply(item) for item in replies]

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def endpoint(self, protocol: str, **options: Any) -> Endpoint:
        """An endpoint of it."""
        path = "" if protocol == "anthropic" else "/v1"
        return Endpoint(protocol, base_url=self.url + path, **options)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().splitlines()
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.asked.append(Asked(first.split()[1], headers, json.loads(body or b"null")))
        reply = self._replies[min(len(self.asked), len(self._replies)) - 1]
        writer.write(_head_of(reply) + _chunks_of(reply))
        await writer.drain()
        writer.close()


def _head_of(reply: Reply) -> bytes:
    headers = {"content-type": reply.content_type, "transfer-encoding": "chunked", **reply.headers}
    shown = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {reply.status} any\r\n{shown}connection: close\r\n\r\n".encode()


def _chunks_of(reply: Reply) -> bytes:
    size = f"{len(reply.body):x}\r\n".encode()
    if reply.cut:
        return size + reply.body[:-20]
    return (size + reply.body + b"\r\n" if reply.body else b"") + b"0\r\n\r\n"


class Heard:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.thought: list[str] = []

    async def text(self, delta: str) -> None:
        """Take a piece of the answer."""
        self.said.append(delta)

    async def thinking(self, delta: str) -> None:
        """Take a piece of the reasoning."""
        self.thought.append(delta)


def asking(model: str, *messages: Message, **changes: Any) -> ModelRequest:
    """A request of one user message, if none is given; through JSON, as the ledger keeps it."""
    request = ModelRequest(
        agent="desk", model=model, messages=messages or (user_message("hello"),), **changes
    )
    return ModelRequest.model_validate_json(request.model_dump_json())


def openai_stream(*events: dict[str, Any], done: bool = True) -> bytes:
    """Events as OpenAI's chat API streams them."""
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def typed_stream(*events: dict[str, Any]) -> bytes:
    """Events as Anthropic's and OpenAI's responses API stream them: named by their type."""
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines).encode()


def chat_chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    """One chunk of the chat API."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return _chat([choice])


def chat_usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The last chunk of the chat API."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    return _chat([]) | {"usage": usage}


def _chat(choices: list[Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT",
        "object": "chat.completion.chunk",
        "created": 1741569952,
        "model": "gpt-4o-2024-08-06",
        "service_tier": "default",
        "system_fingerprint": "fp_50cad350e4",
        "choices": choices,
        "usage": None,
    }


SPOKEN = openai_stream(
    chat_chunk({"role": "assistant", "content": "", "refusal": None}),
    chat_chunk({"content": "Hel"}),
    chat_chunk({"content": "lo."}),
    chat_chunk({}, "stop"),
    chat_usage(1200, 5, 1024),
)

CLAUDE_START = {
    "type": "message_start",
    "message": {
        "id": "msg_01XFDUDYJgAACzvnptvVoYEL",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "claude-sonnet-4-5-20250929",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 100,
            "cache_read_input_tokens": 900,
            "output_tokens": 1,
        },
    },
}


def claude_block(
    index: int, block: dict[str, Any], *deltas: dict[str, Any]
) -> Sequence[dict[str, Any]]:
    """A content block of Anthropic's API."""
    return (
        {"type": "content_block_start", "index": index, "content_block": block},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    )


def claude_end(reason: str, output_tokens: int = 50) -> Sequence[dict[str, Any]]:
    """How a message of Anthropic's API ends."""
    delta = {"stop_reason": reason, "stop_sequence": None}
    usage = {"output_tokens": output_tokens}
    return ({"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"})


CLAUDE_THINKS_AND_CALLS = typed_stream(
    CLAUDE_START,
    {"type": "ping"},
    *claude_block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Look "},
        {"type": "thinking_delta", "thinking": "first."},
        {"type": "signature_delta", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"},
    ),
    *claude_block(
        1,
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
    ),
    *claude_block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "One moment."}),
    *claude_block(
        3,
        {"type": "tool_use", "id": "toolu_01T1x1fJ34qAmk2tNTrN7Up6", "name": "look", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"city": "Par'},
        {"type": "input_json_delta", "partial_json": 'is"}'},
    ),
    *claude_end("tool_use"),
)


def _response(status: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": "resp_67ccd3a9da748190baa7f1570fe91ac604becb25c45c1d41",
        "object": "response",
        "created_at": 1741476777,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "model": "gpt-5-2025-08-07",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
        **changes,
    }


_REASONING = {"id": "rs_67cf2f48", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
_SAID = {"type": "output_text", "text": "One moment.", "annotations": []}
_MESSAGE = {
    "id": "msg_67cf2f49",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [_SAID],
}
_CALL = {
    "id": "fc_67cf2f50",
    "type": "function_call",
    "status": "completed",
    "name": "look",
    "call_id": "call_unLAR8MvFNptuiZK6K6HCy5k",
    "arguments": '{"city":"Paris"}',
}
_USAGE = {
    "input_tokens": 1000,
    "input_tokens_details": {"cached_tokens": 600},
    "output_tokens": 80,
    "output_tokens_details": {"reasoning_tokens": 64},
    "total_tokens": 1080,
}


def responses_stream(ending: str, **final: Any) -> bytes:
    """OpenAI's responses API: reasoning, a message, a call, and an end such as `completed`."""
    in_message = {"item_id": "msg_67cf2f49", "output_index": 1, "content_index": 0}
    in_call = {"item_id": "fc_67cf2f50", "output_index": 2}
    added, done = "response.output_item.added", "response.output_item.done"
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response("in_progress")},
        {"type": added, "output_index": 0, "item": _REASONING | {"encrypted_content": None}},
        {"type": done, "output_index": 0, "item": _REASONING},
        {
            "type": added,
            "output_index": 1,
            "item": _MESSAGE | {"content": [], "status": "in_progress"},
        },
        {"type": "response.content_part.added", "part": _SAID | {"text": ""}, **in_message},
        {"type": "response.output_text.delta", "delta": "One ", "logprobs": [], **in_message},
        {"type": "response.output_text.delta", "delta": "moment.", "logprobs": [], **in_message},
        {"type": "response.output_text.done", "text": "One moment.", "logprobs": [], **in_message},
        {"type": "response.content_part.done", "part": _SAID, **in_message},
        {"type": done, "output_index": 1, "item": _MESSAGE},
        {
            "type": added,
            "output_index": 2,
            "item": _CALL | {"arguments": "", "status": "in_progress"},
        },
        {"type": "response.function_call_arguments.delta", "delta": '{"city":', **in_call},
        {"type": "response.function_call_arguments.delta", "delta": '"Paris"}', **in_call},
        {
            "type": "response.function_call_arguments.done",
            "arguments": '{"city":"Paris"}',
            **in_call,
        },
        {"type": done, "output_index": 2, "item": _CALL},
    ]
    if ending:
        response = _response(ending, output=[_REASONING, _MESSAGE, _CALL], usage=_USAGE, **final)
        events.append({"type": f"response.{ending}", "response": response})
    return typed_stream(*({**event, "sequence_number": n} for n, event in enumerate(events)))
