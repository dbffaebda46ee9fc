"""What a worker process has used since it started: CPU in all, by thread, by ledger command.

CPU of single threads is read from Linux; elsewhere only the whole is known. Counting a command
costs two reads of the thread's clock, which is noise beside the command itself.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.stores import Store

_TASKS = Path("/proc/self/task")


class Spent:
    """Counts from its construction on; one per process."""

    def __init__(self, store: Store) -> None:
        self._seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        for kind in ("transact", "read"):
            setattr(store, kind, self._counted(kind, getattr(store, kind)))

    def read(self) -> dict[str, Any]:
        """Seconds of CPU and counts so far."""
        with self._lock:
            return {
                "cpu_s": time.process_time(),
                "threads_s": _thread_seconds(),
                "commands_s": dict(self._seconds),
                "commands": dict(self._calls),
            }

    def _counted(self, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return run(command, *args, **kwargs)
            finally:
                seconds = time.thread_time() - begun
                with self._lock:
                    name = f"{kind} {command.__name__}"
                    self._seconds[name] += seconds
                    self._calls[name] += 1

        return counted


def _thread_seconds() -> dict[str, float]:
    if not _TASKS.exists():
        return {}
    names = {thread.native_id: _kind(thread.name) for thread in threading.enumerate()}
    seconds: Counter[str] = Counter()
    for task in _TASKS.iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            # The thread has ended, or the kernel does not keep these numbers.
            continue
        seconds[names.get(int(task.name), "Temporal's core")] += nanoseconds / 1e9
    return dict(seconds)


def _kind(thread_name: str) -> str:
    if thread_name == "MainThread":
        return "event loop: activities and SDK"
    if thread_name.startswith("perdure-store"):
        return "ledger"
    if thread_name.startswith("temporal_workflow"):
        return "workflow code"
    return "other threads"
