"""`temporal activity pause` and `unpause` of a running tool: its effect starts once, as ever.

Temporal itself would run a second attempt, also where it was told that one is all (measured).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import effect_counts, until
from harness.turn_stage import (
    STEADY,
    Handle,
    Stage,
    beats,
    result_of,
    start_fault_turn,
    temporal,
    until_async,
    worker_and_standby,
)
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client

from perdure.cli.dev_server import DevServer
from perdure.stores import Store

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def stage(tmp_path: Path, client: Client, task_queue: str, file_store: Store) -> Iterator[Stage]:
    on_stage = Stage(tmp_path, client, task_queue, file_store)
    yield on_stage
    on_stage.release()


async def order(client: Client, what: str, handle: Handle) -> None:
    """Give the order about the only pending activity."""
    (activity,) = (await handle.describe()).raw_description.pending_activities
    which = ("--workflow-id", handle.id, "--activity-id", activity.activity_id)
    await temporal(client, "activity", what, *which)


async def is_paused(handle: Handle) -> bool:
    """Whether an activity stands still because of the order."""
    described = (await handle.describe()).raw_description
    paused = PendingActivityState.PENDING_ACTIVITY_STATE_PAUSED
    return [item.state for item in described.pending_activities] == [paused]


@pytest.mark.parametrize("orders", [("pause",), ("pause", "unpause"), ("reset",)])
async def test_an_unsafe_tool_runs_on_whatever_is_ordered_and_its_own_result_wins(
    stage: Stage, client: Client, running: Any, orders: tuple[str, ...]
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        handle = await stage.start("use send")
        await stage.holding("send")

        for what in orders:
            await order(client, what, handle)
        # Long enough for the worker to be told of the order.
        await beats(handle, "stage.send", 3.0)
        stage.release()

        assert (await result_of(handle)).answer == "done: sent"
    stage.sound()
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1, 2: 1})


async def test_a_safe_tool_is_stopped_by_a_pause_and_runs_again_after_it(
    stage: Stage, client: Client, running: Any
) -> None:
    stage.holds = {"look"}
    async with running(stage.app, STEADY):
        handle = await stage.start("use look")
        await stage.holding("look")

        await order(client, "pause", handle)
        await until_async(lambda: is_paused(handle))
        assert stage.effects == {"look": 1}
        await order(client, "unpause", handle)

        assert (await result_of(handle)).answer == "done: seen"
    stage.sound()
    assert (stage.effects, stage.asked()) == ({"look": 2}, {1: 1, 2: 1})


async def test_after_a_pause_a_dead_worker_and_an_unpause_the_call_is_interrupted(
    server: DevServer, client: Client, task_queue: str, tmp_path: Path
) -> None:
    async with worker_and_standby(
        tmp_path, server.address, task_queue, PERDURE_FAULT_HOLD="send"
    ) as (first, standby):
        handle = await start_fault_turn(client, task_queue, "use send")
        await until(lambda: (tmp_path / "holding.send").exists())
        await order(client, "pause", handle)
        first.kill()
        standby.go()

        await order(client, "unpause", handle)

        result = await result_of(handle)
    assert result.answer is not None
    assert "interrupted" in result.answer
    assert effect_counts(tmp_path) == {"send": 1}
