"""The HTTP front of the demo's small model: passes requests on to its runtime, and counts them.

It speaks the OpenAI protocol (streams only) to whoever is on this machine. What is said is neither
kept nor written anywhere; each model call leaves one line with its cost and its end.
"""

import contextlib
import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from perdure.cli.demo_real_words import as_stream, ask, read_choice

HOST: Final = "127.0.0.1"
MODEL: Final = "smollm2-135m-instruct"

_CHAT: Final = "/v1/chat/completions"
_DONE: Final = b"[DONE]"
_REQUEST_BYTES_MAX: Final = 1024 * 1024
_READ_TIMEOUT_S: Final = 300.0


class RequestLog:
    """One line of JSON per model call: what it cost and how it ended, never what was said."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, outcome: str, usage: dict[str, Any], finish_reason: str) -> None:
        """Note a call: `answered`, `cut` (its caller went away) or `failed`."""
        if self._path is None:
            return
        line = {
            "outcome": outcome,
            "input_tokens": usage.get("prompt_tokens", 0),
            "output_tokens": usage.get("completion_tokens", 0),
            "finish_reason": finish_reason,
        }
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class ModelFront(ThreadingHTTPServer):
    """The server that is asked, on loopback; it passes requests on to the runtime at `address`."""

    daemon_threads = True

    def __init__(self, port: int, address: str, log: RequestLog) -> None:
        self.log = log
        parts = urlsplit(address)
        self._runtime = (parts.hostname or HOST, parts.port)
        super().__init__((HOST, port), _Handler)

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the runtime."""
        host, port = self._runtime
        return http.client.HTTPConnection(host, port, timeout=_READ_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    @property
    def front(self) -> ModelFront:
        return cast("ModelFront", self.server)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"status": "ok"})
        elif self.path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "perdure"}
            self._reply(200, {"object": "list", "data": [model]})
        else:
            self.refuse(404, "there is no such path")

    def do_POST(self) -> None:
        if self.path != _CHAT:
            self.refuse(404, "there is no such path")
            return
        try:
            request = self._body()
            asked = ask(request)
        except (ValueError, RecursionError):
            self.refuse(400, "this is no chat request")
            return
        if request.get("stream") is not True:
            self.refuse(400, "only streams are given")
            return
        with contextlib.closing(self.front.connect()) as connection:
            _Call(self).run(connection, asked.body, chooses=asked.chooses)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()

    def refuse(self, status: int, message: str) -> None:
        self._reply(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def log_message(self, format: str, *args: Any) -> None:
        # What was asked stands in the request log.
        pass

    def _body(self) -> dict[str, Any]:
        size = int(self.headers.get("content-length") or 0)
        if not 0 < size <= _REQUEST_BYTES_MAX:
            raise ValueError("the request is empty or too long")
        body: Any = json.loads(self.rfile.read(size))
        if not isinstance(body, dict):
            raise ValueError("the request is no object")
        return cast("dict[str, Any]", body)

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


class _Call:
    """One call of the model, passed on and noted."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""
        self._noted = False

    def run(
        self, connection: http.client.HTTPConnection, body: dict[str, Any], *, chooses: bool
    ) -> None:
        """Ask the runtime; what it answers goes to the caller as it comes."""
        headers = {"content-type": "application/json"}
        try:
            connection.request("POST", _CHAT, json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self._note("failed")
                status = 400 if answer.status < 500 else 503
                self._handler.refuse(status, "the runtime refused the request")
            elif chooses:
                self._choose(json.loads(answer.read()))
            else:
                self._stream(answer)
        except (BrokenPipeError, ConnectionResetError):
            self._note("cut")
        except (OSError, http.client.HTTPException, ValueError):
            # The caller sees a stream without its end.
            self._note("failed")

    def _choose(self, answer: dict[str, Any]) -> None:
        message, self._finish_reason = read_choice(answer)
        self._usage = answer.get("usage") or {}
        self._handler.begin_stream()
        for chunk in as_stream(answer, message, self._finish_reason):
            self._send(f"data: {json.dumps(chunk)}\n\n".encode())
        self._note("answered")
        self._send(b"data: " + _DONE + b"\n\n")

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        # The runtime's own bytes; they are read only for what they cost.
        self._handler.begin_stream()
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if data == _DONE:
                self._note("answered")
            elif data.startswith(b"{"):
                self._read(json.loads(data))
            self._send(line)
        self._note("failed")

    def _read(self, chunk: dict[str, Any]) -> None:
        self._usage = chunk.get("usage") or self._usage
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        for choice in choices:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _note(self, outcome: str) -> None:
        # Before the end is sent: whoever has the whole answer finds its line.
        if not self._noted:
            self._noted = True
            self._handler.front.log.write(outcome, self._usage, self._finish_reason)

    def _send(self, data: bytes) -> None:
        self._handler.wfile.write(data)
        self._handler.wfile.flush()
