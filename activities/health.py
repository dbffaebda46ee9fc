"""One small HTTP server for operators: `/healthz`, `/readyz` and, where it is on, `/metrics`.

It runs in threads, so that it also answers when the event loop does not. A port that cannot be had
is a line in the log and nothing else. It must not change anything, and serves no content of turns.
"""

import asyncio
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as NotAnswered
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from temporalio.client import Client
from temporalio.service import RPCError

from perdure.activities.ledger_calls import LedgerCalls

logger = logging.getLogger("perdure.health")

_REQUEST_S_MAX = 5.0
_CHECK_S_MAX = 3.0
_ANSWER_S_MAX = 2.0
# Probes come from several sides; the store and Temporal are asked once a second at most.
_FRESH_S = 1.0
_TEXT = "text/plain; charset=utf-8"

# None is well; else a word that says what is not.
Check = Callable[[], Awaitable[str | None]]


@dataclass(frozen=True)
class Exposition:
    """What `/metrics` answers: a function that any thread may call, and its content type."""

    render: Callable[[], bytes]
    content_type: str


class Health:
    """What the probes are told. `ready` is a coroutine function, run on the worker's loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ready: Check, exposition: Exposition | None = None
    ) -> None:
        self.exposition = exposition
        self._loop = loop
        self._ready = ready
        self._lock = threading.Lock()
        self._known: str | None = None
        self._known_s = float("-inf")
        self._servers: list[ThreadingHTTPServer] = []

    def serve(self, host: str, port: int) -> int | None:
        """Serve in a thread; returns the port, or None where it cannot be had."""
        try:
            server = _Server((host, port), _handler_of(self))
        except OSError as error:
            logger.warning("port %s cannot be served (%s); turns go on", port, error.strerror)
            return None
        threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name=f"perdure-health-{port}",
            daemon=True,
        ).start()
        self._servers.append(server)
        return int(server.server_address[1])

    def close(self) -> None:
        """Stop serving; a request that hangs is left to its thread."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()

    def alive(self) -> str | None:
        """None if the event loop answers."""
        return self._asked(_answer)

    def ready(self) -> str | None:
        """None if the worker can take work; the word of a moment ago counts."""
        with self._lock:
            if time.monotonic() - self._known_s > _FRESH_S:
                self._known = self._asked(self._ready)
                self._known_s = time.monotonic()
            return self._known

    def _asked(self, check: Check) -> str | None:
        question = _ask(check)
        try:
            asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:
            question.close()
            return "stopped"
        try:
            return asked.result(_CHECK_S_MAX)
        except NotAnswered:
            asked.cancel()
            return "no answer"
        except Exception as error:  # The probe's edge: a check that breaks is not ready.
            return type(error).__name__


class Readiness:
    """Whether a worker can take work: it polls, its store and Temporal answer."""

    def __init__(
        self, ledger: LedgerCalls, client: Client, polling: Callable[[], str | None]
    ) -> None:
        self._ledger = ledger
        self._client = client
        self._polling = polling
        self._reading: asyncio.Future[None] | None = None

    async def check(self) -> str | None:
        """None if ready, else what is not."""
        problem = self._polling()
        if problem is not None:
            return problem
        store, temporal = await asyncio.gather(self._store(), self._temporal())
        return store or temporal

    async def _store(self) -> str | None:
        # One read at a time: a store that hangs must not take all the threads of the turns.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._ledger.probe())
        await asyncio.wait({self._reading}, timeout=_ANSWER_S_MAX)
        if not self._reading.done():
            return "the store does not answer"
        failed, self._reading = self._reading.exception() is not None, None
        return "the store does not answer" if failed else None

    async def _temporal(self) -> str | None:
        try:
            well = await self._client.service_client.check_health(
                timeout=timedelta(seconds=_ANSWER_S_MAX)
            )
        except (RPCError, RuntimeError):
            return "Temporal does not answer"
        return None if well else "Temporal is not well"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A worker that stops must not wait for a probe that hangs.
    block_on_close = False
    # Two workers on one port would answer for each other.
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking the name service who we are, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away is no news."""
        logger.debug("a request ended early")


def _handler_of(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S_MAX
        server_version = "perdure"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics" and health.exposition is not None:
                self._send(200, health.exposition.render(), health.exposition.content_type)
            elif path == "/healthz":
                self._say(health.alive())
            elif path == "/readyz":
                self._say(health.ready())
            else:
                self._send(404, b"not found\n", _TEXT)

        def log_message(self, format: str, *args: Any) -> None:
            """Probes come every few seconds: nothing to log."""

        def _say(self, problem: str | None) -> None:
            text = f"{problem or 'ok'}\n".encode()
            self._send(503 if problem is not None else 200, text, _TEXT)

        def _send(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


async def _answer() -> str | None:
    return None


async def _ask(check: Check) -> str | None:
    return await check()
