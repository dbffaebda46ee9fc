"""The activities of an app, named as `contracts/calls.py` says, ready for a Temporal worker."""

from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import activity

from perdure.activities.engine import Engine
from perdure.activities.failures import translated
from perdure.activities.gate import Gate
from perdure.activities.log_ids import with_log_ids
from perdure.activities.model_step import ModelStep
from perdure.activities.turn_end import end, follow_turn
from perdure.agents import Agent, Tool
from perdure.contracts.calls import (
    CALL_MODEL,
    END,
    FOLLOW_TURN,
    SETTLE,
    CallModel,
    CallTool,
    EndTurn,
    FollowTurn,
    Settle,
    reconcile_contract,
    tool_contract,
)
from perdure.contracts.safety import ReplaySafety

# A failure of these could not be answered by the workflow.
_FOR_EVER = (FOLLOW_TURN.name, END.name)

Run = Callable[[Any], Awaitable[dict[str, Any]]]


def activities_of(engine: Engine) -> list[Callable[..., Any]]:
    """Every activity of the engine's app, decorated with its name."""

    async def run_model(value: Any) -> dict[str, Any]:
        return (await ModelStep(engine, CallModel.model_validate(value)).run()).encode()

    async def run_follow(value: Any) -> dict[str, Any]:
        return (await follow_turn(engine, FollowTurn.model_validate(value))).encode()

    async def run_end(value: Any) -> dict[str, Any]:
        return (await end(engine, EndTurn.model_validate(value))).encode()

    async def run_settle(value: Any) -> dict[str, Any]:
        settle = Settle.model_validate(value)
        return (await Gate(engine, settle, None).settle(settle)).encode()

    named: list[tuple[str, Run]] = [
        (CALL_MODEL.name, run_model),
        (FOLLOW_TURN.name, run_follow),
        (END.name, run_end),
        (SETTLE.name, run_settle),
    ]
    for agent in engine.app.agents.values():
        for tool in agent.tools:
            named.extend(_tool_activities(engine, agent, tool))
    return [
        activity.defn(name=name)(with_log_ids(translated(run, for_ever=name in _FOR_EVER)))
        for name, run in named
    ]


def _tool_activities(engine: Engine, agent: Agent, tool: Tool) -> list[tuple[str, Run]]:
    async def run(value: Any) -> dict[str, Any]:
        return (await Gate(engine, CallTool.model_validate(value), tool).run()).encode()

    async def reconcile(value: Any) -> dict[str, Any]:
        return (await Gate(engine, CallTool.model_validate(value), tool).reconcile()).encode()

    found: list[tuple[str, Run]] = [(tool_contract(agent.name, tool.name, tool.replay).name, run)]
    if tool.replay is ReplaySafety.RECONCILED:
        found.append((reconcile_contract(agent.name, tool.name).name, reconcile))
    return found
