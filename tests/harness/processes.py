"""Worker processes of the fault tests, and waiting for what they leave behind.

What any user's test can do with a worker is in `perdure.testing`; this adds what our own apps do.
"""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from perdure.testing import worker_process
from perdure.testing.waiting import POLL_S, WAIT_S, until

__all__ = [
    "POLL_S",
    "WAIT_S",
    "WorkerProcess",
    "effect_counts",
    "effects",
    "model_calls",
    "until",
]

HARNESS = Path(__file__).parent


class WorkerProcess(worker_process.WorkerProcess):
    """A worker of one of the apps beside this file, whose ledger and announcements are in a folder.

    The failpoints may be any of `contracts/failpoints.py`.
    """

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
        ours = {
            "PYTHONPATH": str(HARNESS),
            "PERDURE_HEARTBEAT_TIMEOUT_S": "1",
            "PERDURE_GRACE_S": "1",
            "PERDURE_CANCEL_GRACE_S": "1",
            "PERDURE_FAULT_DIR": str(folder),
            "PERDURE_FAILPOINTS": failpoints,
        }
        super().__init__(
            app,
            address=address,
            task_queue=task_queue,
            store_url=store_url or f"sqlite:///{folder}/ledger.db",
            folder=folder,
            **(ours | environment),
        )

    def fail_at(self, failpoints: str) -> None:
        """Set the failpoints of a process that is not started yet."""
        self.environment["PERDURE_FAILPOINTS"] = failpoints

    def go(self) -> None:
        """Let a standby (`PERDURE_FAULT_STANDBY`) take work."""
        (self.folder / f"standby.{self.pid}.go").touch()

    def thaw(self) -> None:
        """SIGCONT: a frozen process goes on as if nothing had happened."""
        self.resume()

    async def terminate(self) -> int:
        """SIGTERM, however long the end takes; returns the exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended()


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
