"""Cancelling a turn at every stage: one end, and workflow, ledger and next turn agree on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import effect_counts, until
from harness.turn_stage import (
    STEADY,
    Gates,
    Handle,
    Stage,
    cause_of,
    result_of,
    settled,
    start_fault_turn,
    status_of,
    worker_and_standby,
)
from harness.turns import assert_sendable
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError, CancelledError

from perdure.cli.dev_server import DevServer
from perdure.contracts.messages import MessageKind, Role
from perdure.contracts.turn import TurnResult, TurnStatus
from perdure.stores import Store
from perdure.stores.queries import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

COMPLETED, CANCELED, FAILED = (
    WorkflowExecutionStatus.COMPLETED,
    WorkflowExecutionStatus.CANCELED,
    WorkflowExecutionStatus.FAILED,
)


@pytest.fixture
def stage(tmp_path: Path, client: Client, task_queue: str, file_store: Store) -> Iterator[Stage]:
    on_stage = Stage(tmp_path, client, task_queue, file_store)
    yield on_stage
    on_stage.release()


@pytest.fixture
def gates() -> Iterator[type[Gates]]:
    yield Gates
    Gates().remove()


async def is_cancelled(stage: Stage, handle: Handle, request: str = "r1") -> None:
    """The run that was asked is CANCELED, and the ledger says the same."""
    assert isinstance(await cause_of(handle), CancelledError)
    assert await status_of(handle) is CANCELED
    turn = stage.reader.turn(stage.turn_id(request))
    assert turn is not None
    assert (turn.status, turn.stop_reason) == (TurnStatus.CANCELLED, "cancelled")


async def next_turn_goes_on(stage: Stage) -> str:
    """The next turn completes on a valid transcript; returns the marker that its model saw."""
    handle = await stage.start("hello again", "next")
    assert (await result_of(handle)).answer == "hello"
    messages = stage.last_messages()
    assert_sendable(messages)
    markers = [message.text for message in messages if message.kind is MessageKind.MARKER]
    assert len(markers) == 1
    assert markers[0].startswith("[The turn before this ended cancelled")
    return markers[0]


async def test_a_turn_cancelled_before_it_opened_is_found_ended_by_all_that_come_late(
    stage: Stage, running: Any
) -> None:
    handle = await stage.start("use send")
    await handle.cancel()
    async with running(stage.app, STEADY):
        await is_cancelled(stage, handle)

        again = await stage.start("use send")

        failure = await cause_of(again)
        assert isinstance(failure, ApplicationError)
        assert failure.type == "cancelled"
        assert TurnResult.model_validate(failure.details[0]).status is TurnStatus.CANCELLED
        assert (await result_of(await stage.start("hello", "next"))).conversation_version == 1
    kinds = [event.kind for event in stage.sound()]
    assert kinds == ["user_message", "turn_ended"]
    assert (stage.effects, stage.asked()) == ({}, {})
    said = [entry.message.text for entry in stage.reader.transcript("default", stage.conversation)]
    assert said == ["hello", "hello"]


async def test_a_cancelled_turn_that_could_not_have_opened_fails_with_its_refusal(
    stage: Stage, running: Any
) -> None:
    async with running(stage.app, STEADY):
        await result_of(await stage.start("hello"))
    handle = await stage.start("hello", "r2", namespace="other")
    await handle.cancel()

    async with running(stage.app, STEADY):
        failure = await cause_of(handle)

    assert isinstance(failure, ApplicationError)
    assert failure.type == "namespace_mismatch"


async def test_a_turn_cancelled_while_its_model_streams_keeps_the_text_as_aborted(
    stage: Stage, running: Any
) -> None:
    async with running(stage.app, STEADY):
        handle = await stage.start("stream")
        await stage.streaming()

        await handle.cancel()

        await is_cancelled(stage, handle)
        assert await next_turn_goes_on(stage)
    details = stage.reader.details(stage.turn_id())
    assert details is not None
    assert [partial.text for partial in details.aborted_partials] == ["one "]
    assert stage.asked() == {1: 1}
    assert [event.kind for event in stage.sound()] == [
        "user_message",
        "model_prepared",
        "turn_ended",
    ]


@pytest.mark.parametrize(
    ("name", "status", "text", "effect"),
    [
        ("look", "interrupted", "may or may not have taken effect", "was interrupted"),
        ("ship", "interrupted", "may or may not have taken effect", "was interrupted"),
        ("send", "interrupted", "half sent", "was interrupted"),
        ("pay", "ok", "stopped in time", "took effect"),
        ("tidy", "ok", "tidied up", "took effect"),
    ],
)
async def test_a_running_tool_gets_a_short_while_then_its_call_is_closed(
    stage: Stage, running: Any, name: str, status: str, text: str, effect: str
) -> None:
    stage.holds = {name}
    async with running(stage.app, STEADY):
        handle = await stage.start(f"use {name}")
        await stage.holding(name)

        await handle.cancel()

        await is_cancelled(stage, handle)
        assert f"Call {name}: {effect}" in await next_turn_goes_on(stage)
    said = settled(stage.sound())[name]
    assert said[0] == status
    assert text in said[1]
    assert (stage.effects, stage.asked()) == ({name: 1}, {1: 1})


async def test_the_result_of_a_plain_tool_that_ignores_the_cancellation_is_kept_as_late(
    stage: Stage, running: Any
) -> None:
    stage.holds = {"carve"}
    async with running(stage.app, STEADY):
        handle = await stage.start("use carve")
        await stage.holding("carve")

        await handle.cancel()

        await is_cancelled(stage, handle)
        assert "was interrupted" in await next_turn_goes_on(stage)
        stage.release()
        await until(lambda: late_results(stage.reader, stage.turn_id()))
    assert late_results(stage.reader, stage.turn_id()) == ["carved"]
    assert settled(stage.sound())["carve"][0] == "interrupted"
    assert stage.effects == {"carve": 1}


def late_results(reader: Reader, turn_id: str) -> list[str]:
    """What came after the call was closed."""
    details = reader.details(turn_id)
    return [] if details is None else [late.text for late in details.late_results]


async def test_a_call_that_was_not_dispatched_is_closed_as_not_executed_and_stays_so(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    held = gates("dispatch_call.before")
    async with running(stage.app, STEADY):
        handle = await stage.start("use send and look")
        await held.reached("dispatch_call.before", 2)

        await handle.cancel()

        await is_cancelled(stage, handle)
        held.remove()
        marker = await next_turn_goes_on(stage)
    assert "Call send: was not executed. Call look: was not executed." in marker
    said = settled(stage.sound())
    assert {status for status, _ in said.values()} == {"not_executed"}
    assert stage.effects == {}


async def test_an_answer_committed_before_the_cancellation_is_the_result(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    held = gates("commit_answer.committed")
    async with running(stage.app, STEADY):
        handle = await stage.start("hello")
        await held.reached("commit_answer.committed")

        await handle.cancel()

        assert (await result_of(handle)).answer == "hello"
        held.remove()
        await completes_unmarked(stage, handle)


async def test_an_answer_committed_while_the_end_is_on_its_way_is_the_result(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    held = gates("commit_answer.before", "end_turn.before")
    async with running(stage.app, STEADY):
        handle = await stage.start("hello")
        await held.reached("commit_answer.before")
        await handle.cancel()
        await held.reached("end_turn.before")

        held.open("commit_answer.before")
        await until(lambda: is_over(stage))
        held.open("end_turn.before")

        assert (await result_of(handle)).answer == "hello"
        await completes_unmarked(stage, handle)


async def completes_unmarked(stage: Stage, handle: Handle) -> None:
    """Workflow and ledger say COMPLETED, and the next turn sees an ordinary conversation."""
    assert await status_of(handle) is COMPLETED
    kinds = [event.kind for event in stage.sound()]
    assert kinds == ["user_message", "model_prepared", "model_answered", "turn_ended"]
    turn = stage.reader.turn(stage.turn_id())
    assert turn is not None
    assert (turn.status, turn.answer) == (TurnStatus.COMPLETED, "hello")
    await result_of(await stage.start("hello again", "next"))
    assert [message.role for message in stage.last_messages()] == [
        Role.USER,
        Role.ASSISTANT,
        Role.USER,
    ]


def is_over(stage: Stage) -> bool:
    """Whether the turn has its end."""
    turn = stage.reader.turn(stage.turn_id())
    return turn is not None and turn.status is not TurnStatus.OPEN


async def test_an_answer_that_comes_after_the_end_changes_nothing_but_is_paid_for(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    held = gates("commit_answer.before")
    async with running(stage.app, STEADY):
        handle = await stage.start("hello")
        await held.reached("commit_answer.before")

        await handle.cancel()

        await is_cancelled(stage, handle)
        held.remove()
        await until(lambda: attempt_status(stage) == ["superseded"])
        assert await next_turn_goes_on(stage)
    kinds = [event.kind for event in stage.sound()]
    assert kinds == ["user_message", "model_prepared", "turn_ended"]


def attempt_status(stage: Stage) -> list[str]:
    """What became of each attempt of the model."""
    details = stage.reader.details(stage.turn_id())
    return [] if details is None else [attempt.status for attempt in details.model_attempts]


async def test_text_that_comes_after_the_end_is_not_shown_as_a_partial(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    held = gates("append_step_segments.before")
    async with running(stage.app, STEADY):
        handle = await stage.start("stream")
        await held.reached("append_step_segments.before")
        await handle.cancel()
        await is_cancelled(stage, handle)

        held.remove()
        stage.release()

        assert await next_turn_goes_on(stage)
    stage.sound()


async def test_cancelling_again_while_the_turn_ends_changes_nothing(
    stage: Stage, running: Any, gates: type[Gates]
) -> None:
    held = gates("end_turn.before")
    stage.holds = {"send"}
    async with running(stage.app, STEADY):
        handle = await stage.start("use send")
        await stage.holding("send")
        await handle.cancel()
        await held.reached("end_turn.before")

        await handle.cancel()
        held.remove()

        await is_cancelled(stage, handle)
        assert await next_turn_goes_on(stage)
    assert settled(stage.sound())["send"][0] == "interrupted"


async def test_a_cancelled_turn_whose_worker_was_lost_runs_no_tool_again(
    server: DevServer, client: Client, task_queue: str, tmp_path: Path
) -> None:
    fate = {"PERDURE_FAULT_HOLD": "look", "failpoints": "stop_attempt.before=hold"}
    async with worker_and_standby(tmp_path, server.address, task_queue, **fate) as (first, standby):
        handle = await start_fault_turn(client, task_queue, "use look")
        await until(lambda: effect_counts(tmp_path))
        await handle.cancel()
        await first.reached("stop_attempt.before")

        first.kill()
        standby.go()

        assert isinstance(await cause_of(handle), CancelledError)
    assert effect_counts(tmp_path) == {"look": 1}
