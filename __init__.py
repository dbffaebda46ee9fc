"""Perdure: durable agent turns on Temporal.

The public surface, loaded on first use, so that importing `perdure.client` or `perdure.contracts`
loads neither an SQL library nor a worker.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.agents import (
        NOT_EXECUTED,
        UNKNOWN,
        Agent,
        App,
        Endpoint,
        ReplaySafety,
        ToolContext,
        ToolReturn,
        tool,
    )
    from perdure.contracts import errors

__all__ = [
    "NOT_EXECUTED",
    "UNKNOWN",
    "Agent",
    "App",
    "Endpoint",
    "ReplaySafety",
    "ToolContext",
    "ToolReturn",
    "__version__",
    "errors",
    "tool",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "errors":
        from perdure.contracts import errors

        return errors
    if name in __all__:
        from perdure import agents

        return getattr(agents, name)
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
