"""Worker processes that tests start, freeze and kill, and waiting for what they leave behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

HARNESS = Path(__file__).parent
WAIT_S = 45.0
# Starting Python is most of a worker's work: several at once on a busy machine take a while.
START_S = 120.0
POLL_S = 0.02
# Settings of the tests' own process; without compiled files each start would take twice as long.
_NOT_OURS = ("PERDURE_", "PYTHONDONTWRITEBYTECODE")


class WorkerProcess:
    """`python -m perdure.worker` with an environment of its own; its log is a file."""

    def __init__(
        self,
        folder: Path,
        *,
        address: str,
        task_queue: str,
        app: str = "fault_app:app",
        failpoints: str = "",
        store_url: str | None = None,
        **environment: str,
    ) -> None:
        self.folder = folder
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(_NOT_OURS)},
            "PYTHONPATH": str(HARNESS),
            "TEMPORAL_ADDRESS": address,
            "PERDURE_TASK_QUEUE": task_queue,
            "PERDURE_STORE_URL": store_url or f"sqlite:///{folder}/ledger.db",
            "PERDURE_HEARTBEAT_TIMEOUT_S": "1",
            "PERDURE_GRACE_S": "1",
            "PERDURE_CANCEL_GRACE_S": "1",
            "PERDURE_FAULT_DIR": str(folder),
            "PERDURE_FAILPOINTS": failpoints,
            "PERDURE_FAILPOINT_DIR": str(folder),
            **environment,
        }
        self._command = [sys.executable, "-m", "perdure.worker", "--app", app]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Self:
        """Start it and wait until it polls."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        await until(lambda: "worker ready" in self.log or not self.running, START_S)
        assert self.running, self.log
        return self

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All it has logged."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also of a stopped process, and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: the process stands still and keeps everything it has, locks included."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: a frozen process goes on as if nothing had happened."""
        self.signal(signal.SIGCONT)

    def fail_at(self, failpoints: str) -> None:
        """Set the failpoints of a process that is not started yet."""
        self.environment["PERDURE_FAILPOINTS"] = failpoints

    def go(self) -> None:
        """Let a standby (`PERDURE_FAULT_STANDBY`) take work."""
        (self.folder / f"standby.{self.pid}.go").touch()

    async def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def ended(self) -> int:
        """Wait until it has ended; returns the exit code."""
        await until(lambda: not self.running)
        assert self._process is not None
        return int(self._process.returncode)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    async def reached(self, failpoint: str) -> None:
        """Wait until this process has announced a failpoint."""
        await until(lambda: (self.folder / f"{failpoint}.{self.pid}.reached").exists())

    def release(self, failpoint: str) -> None:
        """Let a process that holds at a failpoint go on."""
        (self.folder / f"{failpoint}.{self.pid}.go").touch()


async def until(condition: Any, timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds; fails with a TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(POLL_S)


def effects(folder: Path) -> list[dict[str, Any]]:
    """Every effect that was started, in order."""
    path = folder / "effects"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def effect_counts(folder: Path) -> Counter[str]:
    """How often each tool's effect was started."""
    return Counter(effect["tool"] for effect in effects(folder))


def model_calls(folder: Path) -> Counter[int]:
    """How often the scripted model was asked, by step."""
    path = folder / "model_calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter(json.loads(line)["step"] for line in lines)
