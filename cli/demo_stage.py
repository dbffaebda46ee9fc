"""Where `perdure demo` plays: a folder, a server, and one worker process at a time."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from perdure.cli.child_process import ChildProcess
from perdure.cli.dev_server import DevServer, search_attribute_arguments
from perdure.contracts.errors import SetupError

APP: Final = "perdure.examples.order_desk:app"
AGENT: Final = "order-desk"
TASK_QUEUE: Final = "perdure"
# Everything waits by the heartbeat: a short one makes a lost worker noticed soon.
HEARTBEAT_TIMEOUT_S: Final = 2.0
_WORKER_GRACE_S: Final = 15.0
_POLL_S: Final = 0.05

Result = TypeVar("Result")


class Stage:
    """The folder of the databases and logs, the server, and the current worker."""

    def __init__(self, folder: Path, app: str = APP) -> None:
        self.folder = folder
        self.app = app
        # What workers get beside their settings.
        self.environment: dict[str, str] = {}
        self.desk = folder / "order-desk"
        self.ledger = folder / "perdure.db"
        self.server = DevServer(
            database=folder / "temporal.db",
            log=folder / "temporal.log",
            extra_arguments=search_attribute_arguments(),
        )
        self._worker: ChildProcess | None = None
        self._workers = 0

    @property
    def store_url(self) -> str:
        """The ledger's URL."""
        return f"sqlite:///{self.ledger}"

    def start_worker(self, hold: str) -> None:
        """Start a worker that holds a first execution at the point `hold`."""
        self._workers += 1
        command = [sys.executable, "-m", "perdure.worker", "--app", self.app]
        log = self.folder / f"worker-{self._workers}.log"
        self._worker = ChildProcess(command, environment=self._environment(hold), log=log)
        self._worker.start()

    async def kill_worker_at(self, hold: str) -> int:
        """SIGKILL the worker once it says that it is at the point; returns its process id."""
        announced = self.desk / f"holding.{hold}"
        worker = self._running()
        await self.unless_worker_ends(_appearance(announced))
        pid = worker.pid
        assert pid is not None, "a worker that is held has not ended"
        worker.kill()
        return pid

    async def unless_worker_ends(self, waiting: Coroutine[Any, Any, Result]) -> Result:
        """Wait for something that needs the worker. Raises SetupError if the worker ends first."""
        worker = self._running()
        wanted = asyncio.ensure_future(waiting)
        ended = asyncio.ensure_future(worker.wait())
        try:
            await asyncio.wait((wanted, ended), return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                return wanted.result()
            last = worker.last_words().splitlines()[-1:]
            raise SetupError(f"the worker ended by itself: {' '.join(last)} (logs: {self.folder})")
        finally:
            wanted.cancel()
            ended.cancel()

    async def stop_worker(self) -> None:
        """Stop the current worker gracefully."""
        if self._worker is not None:
            await self._worker.stop(grace_s=_WORKER_GRACE_S)

    def _running(self) -> ChildProcess:
        assert self._worker is not None, "a worker was started"
        return self._worker

    def _environment(self, hold: str) -> dict[str, str]:
        # Nothing of the caller's own Temporal profile or settings may reach the worker.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TEMPORAL_", "PERDURE_"))
        }
        return kept | {
            "TEMPORAL_ADDRESS": self.server.address,
            "TEMPORAL_CONFIG_FILE": os.devnull,
            "PERDURE_STORE_URL": self.store_url,
            "PERDURE_TASK_QUEUE": TASK_QUEUE,
            "PERDURE_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_TIMEOUT_S),
            "PERDURE_DEMO_DIR": str(self.desk),
            "PERDURE_DEMO_HOLD": hold,
            **self.environment,
        }


async def _appearance(path: Path) -> None:
    # Another process makes the file, so there is nothing to wait for but the file.
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(_POLL_S)
