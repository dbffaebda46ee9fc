"""Deterministic code: what comes next, and how to wait for it.

Imports contracts, temporalio, pydantic and the standard library; anything that does I/O here would
cost every workflow task dearly. No code of a user runs in this room.
"""

from perdure.workflows.turn import AgentTurn

__all__ = ["AgentTurn"]
