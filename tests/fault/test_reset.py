"""`temporal workflow reset`: whatever is reset, nothing that the ledger knows runs again."""

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
    cause_of,
    reset,
    result_of,
    start_fault_turn,
    status_of,
    worker_and_standby,
)
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError, CancelledError

from perdure.cli.dev_server import DevServer
from perdure.contracts import limits
from perdure.contracts.turn import TurnResult
from perdure.stores import Store

pytestmark = [pytest.mark.server, pytest.mark.slow]

POINTS = ("FirstWorkflowTask", "LastWorkflowTask")


@pytest.fixture
def stage(tmp_path: Path, client: Client, task_queue: str, file_store: Store) -> Iterator[Stage]:
    on_stage = Stage(tmp_path, client, task_queue, file_store)
    yield on_stage
    on_stage.release()


async def first_run(client: Client, handle: Handle) -> str:
    """The first run of the newest run's chain, as the owner check asks Temporal for it."""
    described = await client.workflow_service.describe_workflow_execution(
        DescribeWorkflowExecutionRequest(
            namespace="default", execution=WorkflowExecution(workflow_id=handle.id)
        )
    )
    return described.workflow_execution_info.first_run_id


async def newest_run(handle: Handle) -> str:
    """The id of the newest run."""
    return (await handle.describe()).run_id


def only_owner(stage: Stage) -> str:
    """The chain that has acted for the turn since it opened: nobody has taken over."""
    details = stage.reader.details(stage.turn_id())
    assert details is not None
    (owner,) = details.owners
    return owner.run_id


@pytest.mark.parametrize("point", POINTS)
async def test_a_finished_turn_gives_the_same_result_without_doing_anything(
    stage: Stage, client: Client, running: Any, point: str
) -> None:
    async with running(stage.app, STEADY):
        handle = await stage.start("use send")
        result = await result_of(handle)
        events, run = stage.sound(), await newest_run(handle)

        await reset(client, handle, point)

        assert await result_of(handle) == result
        assert await newest_run(handle) != run
        assert await first_run(client, handle) == only_owner(stage)
    assert result.answer == "done: sent"
    assert stage.sound() == events
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1, 2: 1})


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", ["send", "look"])
async def test_a_running_tool_of_a_healthy_worker_goes_on_and_its_own_result_wins(
    stage: Stage, client: Client, running: Any, name: str, point: str
) -> None:
    stage.holds = {name}
    async with running(stage.app, STEADY):
        handle = await stage.start(f"use {name}")
        await stage.holding(name)
        run = await newest_run(handle)

        await reset(client, handle, point)

        assert await newest_run(handle) != run
        # Long enough for the first execution to be told that its run is gone.
        await beats(handle, f"stage.{name}", 2.0)
        stage.release()
        result = await result_of(handle)
        assert await first_run(client, handle) == only_owner(stage)
    assert result.answer == {"send": "done: sent", "look": "done: seen"}[name]
    stage.sound()
    assert (stage.effects, stage.asked()) == ({name: 1}, {1: 1, 2: 1})
    details = stage.reader.details(stage.turn_id())
    assert details is not None
    assert [item.outcome for item in details.operations[0].generations] == ["won"]
    assert details.late_results == ()


@pytest.mark.parametrize("point", POINTS)
async def test_a_cancelled_turn_stays_cancelled(
    stage: Stage, client: Client, running: Any, point: str
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        handle = await stage.start("use send")
        await stage.holding("send")
        await handle.cancel()
        assert isinstance(await cause_of(handle), CancelledError)
        events, run = stage.sound(), await newest_run(handle)

        await reset(client, handle, point)

        failure = await cause_of(handle)
        assert await newest_run(handle) != run
        status = await status_of(handle)
    if status is WorkflowExecutionStatus.CANCELED:
        # Temporal has handed the cancellation on to the new run.
        assert isinstance(failure, CancelledError)
    else:
        assert isinstance(failure, ApplicationError)
        assert failure.type == "cancelled"
        assert TurnResult.model_validate(failure.details[0]).turn_id == stage.turn_id()
    assert stage.sound() == events
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1})


@pytest.mark.parametrize("point", POINTS)
async def test_a_failed_turn_stays_failed_with_its_reason(
    stage: Stage, client: Client, running: Any, point: str
) -> None:
    async with running(stage.app, STEADY):
        handle = await stage.start("fail")
        before = await cause_of(handle)
        events, run = stage.sound(), await newest_run(handle)

        await reset(client, handle, point)

        after = await cause_of(handle)
        assert await newest_run(handle) != run
    assert isinstance(before, ApplicationError)
    assert isinstance(after, ApplicationError)
    assert (after.type, after.details) == (before.type, before.details)
    assert after.type == "model_failed"
    assert stage.sound() == events
    assert stage.asked() == {1: 1}


async def test_a_model_that_had_not_answered_is_asked_again_and_nothing_is_doubled(
    stage: Stage, client: Client, running: Any
) -> None:
    async with running(stage.app, STEADY):
        handle = await stage.start("stream")
        await stage.streaming()

        await reset(client, handle, "FirstWorkflowTask")

        await until(lambda: stage.asked() == {1: 2})
        stage.release()
        assert (await result_of(handle)).answer == "one two"
    kinds = [event.kind for event in stage.sound()]
    assert kinds == ["user_message", "model_prepared", "model_answered", "turn_ended"]
    details = stage.reader.details(stage.turn_id())
    assert details is not None
    assert [partial.text for partial in details.aborted_partials] == ["one "]


async def test_the_chain_of_a_turn_stays_its_owner_through_continue_as_new_and_reset(
    stage: Stage, client: Client, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After each tool: 15 events is what a model step and a tool have left behind.
    monkeypatch.setattr(limits, "CONTINUE_AS_NEW_EVENTS", 15)
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        handle = await stage.start("use look then send")
        first = await newest_run(handle)
        await stage.holding("send")
        second = await newest_run(handle)

        await reset(client, handle, "FirstWorkflowTask")

        third = await newest_run(handle)
        await beats(handle, "stage.send", 2.0)
        stage.release()
        assert (await result_of(handle)).answer == "done: sent"
        assert await first_run(client, handle) == only_owner(stage) == first
    assert len({first, second, third}) == 3
    stage.sound()
    assert (stage.effects, stage.asked()) == ({"look": 1, "send": 1}, {1: 1, 2: 1, 3: 1})


async def test_a_reset_after_the_worker_died_finds_the_call_interrupted(
    server: DevServer, client: Client, task_queue: str, tmp_path: Path, file_store: Store
) -> None:
    async with worker_and_standby(
        tmp_path, server.address, task_queue, PERDURE_FAULT_HOLD="send"
    ) as (first, standby):
        handle = await start_fault_turn(client, task_queue, "use send")
        await until(lambda: (tmp_path / "holding.send").exists())
        first.kill()
        standby.go()

        await reset(client, handle, "FirstWorkflowTask")

        result = await result_of(handle)
    assert result.answer is not None
    assert "interrupted" in result.answer
    assert "half sent" in result.answer
    assert effect_counts(tmp_path) == {"send": 1}
