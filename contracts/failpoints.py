"""Named points at which a test may stop, delay or fail a real process.

Nothing happens unless `PERDURE_FAILPOINTS` is set or a test installs an action. A point that is set
to `hold` announces itself through a file and waits for another one, so that a test kills or freezes
the process exactly there and can prove that the point was reached.

    PERDURE_FAILPOINTS="t1.committed=hold;t2.begin=hold@2"  PERDURE_FAILPOINT_DIR=/some/folder

`NAME=hold[@N]` acts on the N-th visit of this process; `error` raises a lost-connection error.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.01


class InjectedFault(Exception):
    """Stands for a driver error, such as a connection lost after COMMIT."""


class _Registry:
    def __init__(self) -> None:
        self.actions: dict[str, Callable[[], None]] = {}
        self.visits: Counter[str] = Counter()
        self.lock = threading.Lock()
        for item in filter(None, os.environ.get("PERDURE_FAILPOINTS", "").split(";")):
            name, _, action = item.partition("=")
            self.actions[name.strip()] = _from_environment(name.strip(), action.strip())


def failpoint(name: str) -> None:
    """Visit the point `name`: free where nothing is set."""
    if _registry.actions:
        action = _registry.actions.get(name)
        if action is not None:
            action()


def install(actions: dict[str, Callable[[], None]]) -> None:
    """Replace all actions of this process; an empty dict removes them."""
    _registry.visits.clear()
    _registry.actions = dict(actions)


def _from_environment(name: str, action: str) -> Callable[[], None]:
    kind, _, count = action.partition("@")
    nth = int(count or 1)
    folder = Path(os.environ.get("PERDURE_FAILPOINT_DIR", "."))
    if kind not in ("hold", "error"):
        raise ValueError(f"PERDURE_FAILPOINTS: {name}={action}: the action is hold or error")

    def act() -> None:
        with _registry.lock:
            _registry.visits[name] += 1
            if _registry.visits[name] != nth:
                return
        announced = folder / f"{name}.{os.getpid()}.reached"
        announced.write_text(str(os.getpid()))
        if kind == "error":
            raise InjectedFault(name)
        released = folder / f"{name}.{os.getpid()}.go"
        while not released.exists():
            time.sleep(_POLL_S)

    return act


_registry = _Registry()
