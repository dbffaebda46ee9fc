"""What a host has of its own in a worker that also runs our turns: a workflow and an activity."""

from datetime import timedelta
from typing import Any

from temporalio import activity, workflow


@activity.defn
async def greet(name: str) -> str:
    """An activity of the host's own."""
    return f"hello {name}"


@workflow.defn
class HostsOwn:
    """A workflow of the host's own, which also starts a turn as a child."""

    @workflow.run
    async def run(self, turn: dict[str, Any]) -> list[str]:
        """Greet, and let a turn run."""
        greeting = await workflow.execute_activity(
            greet, "host", start_to_close_timeout=timedelta(seconds=10)
        )
        result: dict[str, Any] = await workflow.execute_child_workflow(
            "AgentTurn", turn, result_type=dict[str, Any]
        )
        return [greeting, result["answer"]]


@workflow.defn(name="HostsOwn")
class Rewritten:
    """The same workflow after an incompatible change."""

    @workflow.run
    async def run(self, turn: dict[str, Any]) -> list[str]:
        """Do nothing of what it did."""
        return []
