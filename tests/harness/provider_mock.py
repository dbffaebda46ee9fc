"""`llmock`, a mock server of model providers that others wrote, as a process of its own.

It breaks answers as it is told, keeps a log of every request, and judges the client by it.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

from perdure.agents import Endpoint

START_S = 60.0
POLL_S = 0.02
_PATHS = {"openai": "/v1", "openai-responses": "/v1", "anthropic": "/anthropic"}


class Llmock:
    """`async with Llmock(folder) as mock:`; it listens on a free port of the loopback."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._log = folder / "llmock.log"
        self._options = options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def endpoint(self, protocol: str) -> Endpoint:
        """An endpoint of it that speaks this protocol."""
        base_url = self.url + _PATHS[protocol]
        return Endpoint(protocol, base_url=base_url, api_key="mock")

    async def __aenter__(self) -> Self:
        program = Path(sys.executable).with_name("llmock")
        command = [str(program), "serve", "--port", str(self._port), *self._options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "LLMOCK_HOST": "127.0.0.1"}
            )
        async with asyncio.timeout(START_S):
            while not await self._answers():
                assert self._process.poll() is None, self._log.read_text()
                await asyncio.sleep(POLL_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    async def tell(self, *behaviors: dict[str, Any]) -> None:
        """Queue what it is to do with the next requests."""
        await self._call("POST", "scenario", {"behaviors": behaviors})

    async def reset(self) -> None:
        """Forget every request and what is queued."""
        await self._call("POST", "reset")

    async def recover(self) -> None:
        """Do nothing more of what is queued."""
        await self._call("DELETE", "scenario")

    async def requests(self) -> list[dict[str, Any]]:
        """Every request that it has finished serving, oldest first."""
        found: list[dict[str, Any]] = (await self._call("GET", "requests"))["requests"]
        return found

    async def verdict(self) -> list[str]:
        """What it has against the client, warnings as well."""
        findings = (await self._call("GET", "verdict"))["findings"]
        return [f"{finding['code']}: {finding['title']}" for finding in findings]

    async def _answers(self) -> bool:
        try:
            await self._call("GET", "requests")
        except OSError:
            return False
        return True

    async def _call(self, method: str, what: str, body: Any = None) -> Any:
        return await asyncio.to_thread(self._request, method, what, body)

    def _request(self, method: str, what: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/_llmock/{what}", data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())
