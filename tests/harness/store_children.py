"""Starting `ledger_child` processes and talking to them line by line."""

import os
import subprocess
import sys
from pathlib import Path

from harness import ledger_child

TESTS = Path(ledger_child.__file__).parents[1]


class Child:
    """A process that obeys lines of input."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(ledger_child.__file__), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def hear(self) -> str:
        """The next line it says."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, line: str = "go") -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def exit_code(self) -> int:
        """Wait until it has ended."""
        return self._process.wait(timeout=60)

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()
