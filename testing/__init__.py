"""For those who test agents of their own: a pytest plugin and what its fixtures are made of.

A project's top `conftest.py` says `pytest_plugins = ["perdure.testing"]`. Everything is loaded on
first use: importing `ScriptedModel` from here loads neither pytest nor Temporal nor SQL. Nothing in
this room may be imported by a worker's own code. (PYTEST_DONT_REWRITE: a conftest may import from
here before it names the plugin.)
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from perdure.activities.providers.scripted import (
        Attempts,
        Call,
        Failure,
        Reply,
        Rule,
        ScriptedModel,
        ScriptedUsage,
        attempts,
        call,
    )
    from perdure.testing.histories import record_histories, replays
    from perdure.testing.models import with_model
    from perdure.testing.stage import Stage, running_worker
    from perdure.testing.turns import Turn
    from perdure.testing.waiting import until
    from perdure.testing.worker_process import Hold, WorkerProcess

__all__ = [
    "Attempts",
    "Call",
    "Failure",
    "Hold",
    "Reply",
    "Rule",
    "ScriptedModel",
    "ScriptedUsage",
    "Stage",
    "Turn",
    "WorkerProcess",
    "attempts",
    "call",
    "record_histories",
    "replays",
    "running_worker",
    "until",
    "with_model",
]

# What pytest reads when `perdure.testing` is named as a plugin.
pytest_plugins: Final = ("perdure.testing.plugin",)

_SCRIPTED: Final = "perdure.activities.providers.scripted"
_ELSEWHERE: Final = {
    "Hold": "perdure.testing.worker_process",
    "Stage": "perdure.testing.stage",
    "Turn": "perdure.testing.turns",
    "WorkerProcess": "perdure.testing.worker_process",
    "record_histories": "perdure.testing.histories",
    "replays": "perdure.testing.histories",
    "running_worker": "perdure.testing.stage",
    "until": "perdure.testing.waiting",
    "with_model": "perdure.testing.models",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_ELSEWHERE.get(name, _SCRIPTED)), name)
    raise AttributeError(f"module 'perdure.testing' has no attribute {name!r}")
