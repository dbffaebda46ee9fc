"""Who acts for a turn: two starts of one request, dead owners, held conversations."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import until
from harness.turn_stage import (
    STEADY,
    Gates,
    Handle,
    Stage,
    beats,
    cause_of,
    pending,
    reset,
    result_of,
    settled,
    status_of,
    temporal,
    until_async,
)
from harness.turns import assert_sendable, rows
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.contracts.calls import Opening, Owner, TurnRef
from perdure.contracts.messages import MessageKind, user_message
from perdure.contracts.turn import TurnRequest, TurnStatus
from perdure.stores import Store
from perdure.stores.commands import PrepareStep
from perdure.stores.turns import prepare_step

pytestmark = [pytest.mark.server, pytest.mark.slow]

RUNNING = WorkflowExecutionStatus.RUNNING


@pytest.fixture
def stage(tmp_path: Path, client: Client, task_queue: str, file_store: Store) -> Iterator[Stage]:
    on_stage = Stage(tmp_path, client, task_queue, file_store)
    yield on_stage
    on_stage.release()


@pytest.fixture
def gates() -> Iterator[type[Gates]]:
    yield Gates
    Gates().remove()


async def terminate(client: Client, handle: Handle) -> None:
    """`temporal workflow terminate`."""
    await temporal(client, "workflow", "terminate", "--workflow-id", handle.id)


async def follows(handle: Handle) -> None:
    """Wait until that workflow follows another one's turn."""
    await until_async(lambda: pending(handle, "follow_turn"))


def owners(stage: Stage, request: str = "r1") -> list[tuple[int, str, str]]:
    """Epoch, workflow and reason of everybody who ever acted for the turn."""
    details = stage.reader.details(stage.turn_id(request))
    assert details is not None
    return [(owner.epoch, owner.workflow_id, owner.reason) for owner in details.owners]


async def test_of_two_starts_at_once_one_acts_and_the_other_follows_to_the_same_result(
    stage: Stage, running: Any
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        handles = await asyncio.gather(stage.start("use send"), stage.start("use send"))
        await stage.holding("send")
        acting = owners(stage)[0][1]
        (follower,) = [handle for handle in handles if handle.id != acting]
        await follows(follower)

        stage.release()

        results = [await result_of(handle) for handle in handles]
    assert results[0] == results[1]
    assert results[0].answer == "done: sent"
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1, 2: 1})
    assert owners(stage) == [(1, acting, "opened")]
    stage.sound()


async def test_a_follower_takes_over_from_a_terminated_owner_and_runs_nothing_again(
    stage: Stage, client: Client, running: Any
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        owner = await stage.start("use send")
        await stage.holding("send")
        follower = await stage.start("use send")
        await follows(follower)

        await terminate(client, owner)

        await until_async(lambda: pending(follower, "stage.send"))
        stage.release()
        assert (await result_of(follower)).answer == "done: sent"
    assert owners(stage) == [(1, owner.id, "opened"), (2, follower.id, "taken_over")]
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1, 2: 1})
    stage.sound()


async def test_a_start_under_the_workflow_id_of_a_terminated_owner_takes_over(
    stage: Stage, client: Client, running: Any
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        owner = await stage.start("use send")
        await stage.holding("send")
        await terminate(client, owner)

        again = await stage.start("use send", workflow_id=owner.id)

        await until_async(lambda: pending(again, "stage.send"))
        stage.release()
        assert (await result_of(again)).answer == "done: sent"
    assert owners(stage) == [(1, owner.id, "opened"), (2, owner.id, "taken_over")]
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1, 2: 1})
    stage.sound()


async def test_an_owner_that_comes_back_after_it_was_replaced_follows(
    stage: Stage, client: Client, running: Any
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        first = await stage.start("use send")
        await stage.holding("send")
        await terminate(client, first)
        second = await stage.start("use send")
        await until_async(lambda: pending(second, "stage.send"))

        await reset(client, first, "LastWorkflowTask")

        await follows(first)
        stage.release()
        assert await result_of(first) == await result_of(second)
    assert [epoch for epoch, _, _ in owners(stage)] == [1, 2]
    assert (stage.effects, stage.asked()) == ({"send": 1}, {1: 1, 2: 1})
    stage.sound()


async def test_the_next_request_ends_a_terminated_turn_and_goes_on(
    stage: Stage, client: Client, running: Any
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        dead = await stage.start("use send and look")
        await stage.holding("send")
        await until(lambda: "look" in settled(stage.events()))
        await terminate(client, dead)

        assert (await result_of(await stage.start("hello", "r2"))).answer == "hello"

        messages = stage.last_messages()
        assert_sendable(messages)
        marker = next(item.text for item in messages if item.kind is MessageKind.MARKER)
        stage.release()
        again = await cause_of(await stage.start("use send and look"))
    assert isinstance(again, ApplicationError)
    assert again.type == "turn_lost"
    turn = stage.reader.turn(stage.turn_id())
    assert turn is not None
    assert (turn.status, turn.stop_reason) == (TurnStatus.FAILED, "turn_lost")
    said = settled(stage.sound())
    assert (said["send"][0], said["look"]) == ("interrupted", ("ok", "seen"))
    assert "half sent" in said["send"][1]
    assert "Call send: was interrupted" in marker
    assert "Call look: took effect." in marker
    assert (stage.effects, stage.asked()) == ({"send": 1, "look": 1}, {1: 1})


async def test_a_busy_conversation_refuses_a_direct_start_and_writes_nothing(
    stage: Stage, running: Any, file_store: Store
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        holder = await stage.start("use send")
        await stage.holding("send")
        before = rows(file_store)

        failure = await cause_of(await stage.start("hello", "r2"))

        assert rows(file_store) == before
        assert stage.reader.turn(stage.turn_id("r2")) is None
        stage.release()
        assert (await result_of(holder)).answer == "done: sent"
    assert isinstance(failure, ApplicationError)
    assert failure.type == "conversation_busy"
    assert stage.turn_id() in failure.message


async def test_cancelling_a_follower_ends_only_the_following(stage: Stage, running: Any) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        owner = await stage.start("use send")
        await stage.holding("send")
        follower = await stage.start("use send")
        await follows(follower)

        await follower.cancel()

        gave_up = await cause_of(follower)
        assert isinstance(gave_up, ApplicationError)
        assert gave_up.type == "following_cancelled"
        stage.release()
        assert (await result_of(owner)).answer == "done: sent"
    stage.sound()


async def test_a_start_cancelled_before_it_could_know_that_it_follows_ends_only_itself(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        owner = await stage.start("use send")
        await stage.holding("send")
        held = gates("prepare_step.before")
        late = await stage.start("use send")
        await held.reached("prepare_step.before")

        await late.cancel()

        gave_up = await cause_of(late)
        assert isinstance(gave_up, ApplicationError)
        assert gave_up.type == "following_cancelled"
        held.remove()
        stage.release()
        assert (await result_of(owner)).answer == "done: sent"
    assert [epoch for epoch, _, _ in owners(stage)] == [1]
    stage.sound()


@pytest.mark.parametrize("how", ["deleted", "in a namespace that is not there"])
async def test_a_turn_whose_owner_temporal_does_not_know_stays_with_it(
    stage: Stage, client: Client, running: Any, file_store: Store, how: str
) -> None:
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        if how == "deleted":
            owner = await stage.start("use send")
            await stage.holding("send")
            await temporal(client, "workflow", "delete", "--yes", "--workflow-id", owner.id)
            await until_async(lambda: is_unknown(owner))
        else:
            open_elsewhere(stage, file_store)
        before = rows(file_store)

        refused = await cause_of(await stage.start("hello", "r2"))
        follower = await stage.start("use send")
        await beats(follower, "follow_turn", 2.0)

        assert await status_of(follower) is RUNNING
        assert rows(file_store) == before
        await follower.cancel()
        gave_up = await cause_of(follower)
        assert isinstance(gave_up, ApplicationError)
        assert gave_up.type == "following_cancelled"
        stage.release()
    assert isinstance(refused, ApplicationError)
    assert refused.type == "conversation_busy"
    assert "resume or end it first" in refused.message
    turn = stage.reader.turn(stage.turn_id())
    assert turn is not None
    assert (turn.status, turn.epoch) == (TurnStatus.OPEN, 1)


async def is_unknown(handle: Handle) -> bool:
    """Whether Temporal has forgotten the workflow."""
    try:
        await handle.describe()
    except RPCError as error:
        return error.status is RPCStatusCode.NOT_FOUND
    return False


def open_elsewhere(stage: Stage, store: Store) -> None:
    """Open the turn in the ledger, as a worker of another Temporal would."""
    message = user_message("use send")
    request = TurnRequest(
        agent="stage", conversation_id=stage.conversation, request_id="r1", message=message
    )
    owner = Owner(temporal_namespace="elsewhere", workflow_id="w", run_id="r")
    opening = Opening(
        agent="stage", message=message, request_digest=request.digest, run_id=owner.run_id
    )
    command = PrepareStep(
        turn=TurnRef(**request.key.model_dump()),
        step=1,
        owner=owner,
        opening=opening,
        model="scripted",
        parameters_json="{}",
        instructions="",
        tools_json="[]",
        worker="another",
    )
    store.transact(prepare_step, command)
