"""A worker in a process of its own, which a test can kill, freeze or stop wherever it wants.

It is `python -m perdure.worker` with an environment of its own: nothing of the caller's settings
and Temporal profile reaches it. This module must not know of turns or of pytest.
"""

import os
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from perdure.cli.child_process import ChildProcess
from perdure.contracts.errors import SetupError
from perdure.testing.waiting import until

# Everything waits by the heartbeat: a short one makes a lost worker noticed soon.
WAITS_S: Final = 2
# Starting Python is most of a worker's work: several at once on a busy machine take a while.
START_S: Final = 120.0
GRACE_S: Final = 15.0
READY: Final = "worker ready"
# Without compiled files each start would take twice as long.
_NOT_PASSED_ON: Final = ("PERDURE_", "TEMPORAL_", "PYTHONDONTWRITEBYTECODE")
_SHOWN_LINES: Final = 40


class Hold(StrEnum):
    """Where a worker process stands still at its first tool call, so that a test can kill it there.

    `BEFORE_EFFECT`: the call is allowed to start, which is on record, and has not started.
    `IN_EFFECT`: the tool has reported its first progress (`ctx.output`) and is in its middle.
    `AFTER_EFFECT`: the tool has returned, and its result is not stored yet.
    """

    BEFORE_EFFECT = "dispatch_call.committed"
    IN_EFFECT = "append_tool_output.committed"
    AFTER_EFFECT = "settle_call.before"


class WorkerProcess:
    """A worker for `app`, as `module:attribute`; `async with` starts it and kills it at the end.

    It can import what the caller can. `environment` are further variables of its own. Its log is in
    `folder`, and must be at INFO, its default, or more.
    """

    def __init__(
        self,
        app: str,
        *,
        address: str,
        task_queue: str,
        store_url: str,
        folder: Path,
        hold: Hold | None = None,
        **environment: str,
    ) -> None:
        self.app = app
        self.folder = folder
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self.environment = {
            **{key: value for key, value in os.environ.items() if not _is_private(key)},
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, sys.path))),
            "TEMPORAL_ADDRESS": address,
            "TEMPORAL_CONFIG_FILE": os.devnull,
            "PERDURE_TASK_QUEUE": task_queue,
            "PERDURE_STORE_URL": store_url,
            "PERDURE_HEARTBEAT_TIMEOUT_S": str(WAITS_S),
            "PERDURE_GRACE_S": str(WAITS_S),
            "PERDURE_CANCEL_GRACE_S": str(WAITS_S),
            "PERDURE_FAILPOINTS": "" if hold is None else f"{hold}=hold",
            "PERDURE_FAILPOINT_DIR": str(folder),
            **environment,
        }
        self._hold = hold
        self._child: ChildProcess | None = None
        self._pid: int | None = None
        self._asked_to_end = False

    async def start(self) -> Self:
        """Start it and wait until it takes work. Raises SetupError if it ends before."""
        assert self._child is None, "a worker process is started once"
        command = [sys.executable, "-m", "perdure.worker", "--app", self.app]
        self._child = ChildProcess(command, environment=self.environment, log=self.log_path)
        self._child.start()
        self._pid = self._child.pid
        try:
            await until(lambda: READY in self.log or not self.running, START_S, what="a worker")
        except BaseException:
            # Also a cancelled start must not leave a process behind.
            self.kill()
            raise
        self.check()
        return self

    @property
    def pid(self) -> int:
        """Its process id, also when it has ended."""
        assert self._pid is not None, "the worker process was not started"
        return self._pid

    @property
    def running(self) -> bool:
        """Whether it has not ended; a frozen one has not."""
        return self._child is not None and self._child.pid is not None

    @property
    def ended_by_itself(self) -> bool:
        """Whether it is gone and nobody asked it to go."""
        return self._child is not None and not self.running and not self._asked_to_end

    @property
    def log(self) -> str:
        """All it has logged."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def check(self) -> None:
        """Raise SetupError, with the end of its log as a note, if it has ended by itself."""
        if not self.ended_by_itself:
            return
        lines = self.log.splitlines()[-_SHOWN_LINES:]
        error = SetupError(f"the worker of {self.app!r} ended by itself: {''.join(lines[-1:])}")
        error.add_note("\n".join([f"The end of {self.log_path}:", *lines]))
        raise error

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._child is not None:
            self._asked_to_end |= number not in (signal.SIGSTOP, signal.SIGCONT)
            self._child.send(number)

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would, also when frozen; wait until it is gone."""
        self._asked_to_end = True
        if self._child is not None:
            self._child.kill()

    def freeze(self) -> None:
        """Let it stand still (SIGSTOP) with everything it has, locks included: a stalled worker."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen one go on (SIGCONT) as if nothing had happened."""
        self.signal(signal.SIGCONT)

    async def stop(self, *, grace_s: float = GRACE_S) -> int:
        """Ask it to end (SIGTERM), kill it once the grace has passed; returns the exit code."""
        self.resume()
        self._asked_to_end = True
        assert self._child is not None, "the worker process was not started"
        await self._child.stop(grace_s=grace_s)
        return await self._child.wait()

    async def ended(self) -> int:
        """Wait until it has ended; returns the exit code, which is negative for a signal."""
        assert self._child is not None, "the worker process was not started"
        await until(lambda: not self.running, what=f"the end of the worker of {self.app!r}")
        return await self._child.wait()

    async def held(self) -> None:
        """Wait until it stands still at its `hold`. Raises SetupError if it ends before."""
        assert self._hold is not None, "the worker process has no `hold`"
        await self.reached(self._hold)

    def go_on(self) -> None:
        """Let it go on from its `hold`."""
        assert self._hold is not None, "the worker process has no `hold`"
        self.release(self._hold)

    async def reached(self, failpoint: str) -> None:
        """Wait until it has announced a failpoint (`contracts/failpoints.py`)."""
        announced = self.folder / f"{failpoint}.{self.pid}.reached"
        await until(
            lambda: announced.exists() or self.ended_by_itself, what=f"reaching {failpoint}"
        )
        self.check()

    def release(self, failpoint: str) -> None:
        """Let it go on from a failpoint where it holds."""
        (self.folder / f"{failpoint}.{self.pid}.go").touch()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        self.kill()


def _is_private(variable: str) -> bool:
    return variable.startswith(_NOT_PASSED_ON)
