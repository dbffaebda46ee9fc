"""Reads along with a provider's event stream, and stops it where it is no whole answer.

Client libraries skip events that they cannot read and take an answer that was cut off for a whole
one, so the bytes are looked at here first. Knows no provider but for the shapes of its events; it
must not keep or log what they say.
"""

import json
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import httpx2

from perdure.contracts.errors import ModelProtocolError
from perdure.contracts.limits import ANSWER_PARTS_BYTES_MAX

_CONNECT_TIMEOUT_S: Final = 10.0
_WRITE_TIMEOUT_S: Final = 60.0
_EVENT_STREAM: Final = "text/event-stream"


class StreamWatch:
    """What is known of one call's response. `begun` and `ended` are Anthropic's first and last
    events; the other protocols have a finish reason instead, which `from_provider` asks for.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.begun = False
        self.ended = False
        self._data: list[bytes] = []
        self._size = 0

    def take_line(self, line: bytes) -> None:
        """Take one line of the stream. Raises ModelProtocolError for a chunk that is no event."""
        if not line:
            data, self._data, self._size = b"\n".join(self._data), [], 0
            if data:
                self._take_event(data)
        elif line.startswith(b"data:"):
            self._size += len(line)
            if self._size > ANSWER_PARTS_BYTES_MAX:
                raise ModelProtocolError("an event is longer than any answer", retryable=False)
            self._data.append(line[5:].strip())
        elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise ModelProtocolError("the stream has a line that belongs to no event")

    def check_end(self) -> None:
        """Raises ModelProtocolError if the stream has begun and its last event is missing."""
        if self.begun and not self.ended:
            raise ModelProtocolError("the stream was cut: its last event is missing")

    def _take_event(self, data: bytes) -> None:
        if data.startswith(b"[DONE]"):
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise ModelProtocolError("the stream has a malformed chunk") from None
        if not isinstance(event, dict):
            raise ModelProtocolError("the stream has a chunk that is no object")
        self._read(cast("dict[str, Any]", event))

    def _read(self, event: dict[str, Any]) -> None:
        self.begun = self.begun or event.get("type") == "message_start"
        self.ended = self.ended or event.get("type") == "message_stop"
        for name in ("choices", "candidates"):
            choices = event.get(name)
            if not isinstance(choices, list):
                continue
            shown = cast("list[Any]", choices)
            if len(shown) > 1 or any(_index(choice) for choice in shown):
                # To ask again would buy the same.
                raise ModelProtocolError("the answer has several choices", retryable=False)


def _index(choice: Any) -> int:
    index = cast("dict[str, Any]", choice).get("index") if isinstance(choice, dict) else None
    return index if isinstance(index, int) else 0


_CURRENT: ContextVar[StreamWatch | None] = ContextVar("perdure_stream_watch", default=None)


@contextmanager
def watching() -> Generator[StreamWatch]:
    """Watch the responses that this task's requests get in the block."""
    watch = StreamWatch()
    token = _CURRENT.set(watch)
    try:
        yield watch
    finally:
        _CURRENT.reset(token)


def watched_client() -> httpx2.AsyncClient:
    """An HTTP client whose streams are watched.

    A connection is used once: one that stood idle while its worker was frozen would cost a try, as
    nothing below the activity tries again. Reading has no time-out of its own, the agent's
    `model_timeout_s` is over all. It follows no redirect, which could take a key elsewhere.
    """
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S, write=_WRITE_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        # Compressed bytes could not be read along.
        headers={"accept-encoding": "identity"},
        event_hooks={"response": [_attach]},
        follow_redirects=False,
    )


async def _attach(response: httpx2.Response) -> None:
    watch = _CURRENT.get()
    if watch is None:
        return
    watch.status = response.status_code
    if response.is_success and isinstance(response.stream, httpx2.AsyncByteStream):
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        response.stream = _Watched(response.stream, watch, kind)


class _Watched(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, watch: StreamWatch, kind: str) -> None:
        self._stream = stream
        self._watch = watch
        self._kind = kind

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._kind == "text/html":
            raise ModelProtocolError("the endpoint answers with a web page, not with a model's")
        rest = b""
        async for chunk in self._stream:
            if self._kind == _EVENT_STREAM:
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > ANSWER_PARTS_BYTES_MAX:
                    raise ModelProtocolError("a line is longer than any answer", retryable=False)
                for line in lines:
                    self._watch.take_line(line.rstrip(b"\r"))
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
