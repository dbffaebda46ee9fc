"""A child process of a command: it ends with its parent and says why it ended.

It runs in a session of its own, so that Ctrl-C in a terminal reaches only the command, which stops
its children in the right order. This module must not know what the children are.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

# Linux ends the child when its parent dies, however it dies. The parent may be gone already when
# the request is made, so that is looked at afterwards.
_EXEC_TIED_TO_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_LAST_WORDS_BYTES: Final = 2000


class ChildProcess:
    """One child, whose output goes to `log` (appended) or to a file without a name.

    On Linux the child gets SIGTERM when the *thread* that started it ends, so it is started from
    one that lives long enough, such as the main thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = None if environment is None else dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it; the first word of the command is the path of a program."""
        assert self._process is None, "a child is started once"
        command = self._command
        if sys.platform == "linux":
            tie = [sys.executable, "-I", "-S", "-c", _EXEC_TIED_TO_PARENT, str(os.getpid())]
            command = tie + command
        self._output = self._open_output()
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would, and wait until it is gone."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    async def stop(self, *, grace_s: float) -> None:
        """Ask it to end (SIGTERM), and end it (SIGKILL) once the grace has passed."""
        self.send(signal.SIGTERM)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, grace_s)
        self.kill()

    async def wait(self) -> int:
        """Wait until it ends by itself; returns its exit code."""
        assert self._process is not None, "the child was not started"
        # A thread that waits could not be cancelled, and would keep the command from ending.
        while (code := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return code

    def last_words(self) -> str:
        """The end of what it printed, for an error message."""
        if self._output is None:
            return ""
        # Read without moving the file's position, which the child shares.
        file = self._output.fileno()
        begin = max(os.fstat(file).st_size - _LAST_WORDS_BYTES, 0)
        return os.pread(file, _LAST_WORDS_BYTES, begin).decode(errors="replace").strip()

    def _open_output(self) -> IO[bytes]:
        if self._log is None:
            return tempfile.TemporaryFile()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return self._log.open("a+b")
