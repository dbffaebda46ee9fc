"""What becomes of a turn when its model fails, and when it does not come to an end."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from harness.turns import (
    Answers,
    assert_next_turn_is_valid,
    begin,
    call,
    calls,
    details,
    failure_of,
    operations,
    request,
    run_turn,
    start_raw,
    text,
)
from temporalio.client import Client

from perdure import Agent, App, ReplaySafety, errors, tool
from perdure.contracts.model import ModelRequest, ModelResponse, ModelSink
from perdure.stores import Store
from perdure.stores.queries import Reader

pytestmark = pytest.mark.server

Running = Callable[..., Any]


@tool(replay=ReplaySafety.SAFE)
async def look() -> str:
    """A read."""
    return "seen"


def desk(model: Answers, **options: Any) -> App:
    """One agent with one tool."""
    return App([Agent("desk", model, "Be brief.", [look], **options)])


async def test_an_unavailable_model_is_tried_four_times_and_then_the_turn_can_be_continued(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    model = Answers(errors.ModelUnavailable("busy", retry_after_s=0))
    async with running(desk(model)):
        handle = await start_raw(client, task_queue, request())
        failure = await failure_of(handle)
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    # Each try was sent the same prepared request.
    asked = model.requests[:4]
    assert [one.attempt for one in asked] == [1, 2, 3, 4]
    assert len({one.model_copy(update={"attempt": 0}).model_dump_json() for one in asked}) == 1
    assert (failure.type, failure.non_retryable) == ("model_failed", True)
    assert (result.status, result.stop_reason) == ("failed", "model_failed")
    # The first four are all: the second start was told the outcome, and `next` is another turn.
    assert len(model.requests) == 5
    attempts = details(file_store, result).model_attempts
    assert [(one.status, one.error_code) for one in attempts] == [
        ("failed", "model_unavailable")
    ] * 4
    said = [message.text for message in model.requests[-1].messages]
    assert said[0] == "go"
    assert "failed (model_failed)" in said[1]
    assert said[2] == "next"


async def test_a_retry_after_nothing_comes_at_once(
    client: Client, task_queue: str, running: Running
) -> None:
    moments: list[float] = []

    async def busy(_request: ModelRequest, _sink: ModelSink) -> ModelResponse:
        moments.append(asyncio.get_running_loop().time())
        raise errors.ModelUnavailable("busy", retry_after_s=0)

    async with running(desk(Answers([busy, busy, text("free")]))):
        result = await run_turn(client, task_queue)

    assert result.answer == "free"
    # The usual wait would be two seconds, then four.
    assert moments[1] - moments[0] < 1.5


@pytest.mark.parametrize(
    "error",
    [errors.ModelRefused("no credentials"), errors.ModelUnavailable("gone", retryable=False)],
    ids=["refused", "not retryable"],
)
async def test_a_refusal_of_the_provider_fails_the_turn_at_once(
    client: Client, task_queue: str, file_store: Store, running: Running, error: Exception
) -> None:
    model = Answers(error)
    async with running(desk(model)):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert (result.status, result.stop_reason) == ("failed", "model_failed")
    assert len(details(file_store, result).model_attempts) == 1


async def test_a_protocol_error_is_tried_again(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    broken = errors.ModelProtocolError("no final event", retry_after_s=0.01)
    async with running(desk(Answers([broken, broken, broken, text("at last")]))):
        result = await run_turn(client, task_queue)

    assert result.answer == "at last"
    statuses = [one.status for one in details(file_store, result).model_attempts]
    assert statuses == ["failed", "failed", "failed", "committed"]


@pytest.mark.parametrize("retry_after_s", [-5.0, float("nan"), float("inf")])
async def test_a_senseless_retry_after_is_no_failure_of_ours(
    client: Client, task_queue: str, file_store: Store, running: Running, retry_after_s: float
) -> None:
    broken = errors.ModelUnavailable("busy", retry_after_s=retry_after_s)
    model = Answers([broken, text("free")])
    async with running(desk(model)):
        result = await asyncio.wait_for(run_turn(client, task_queue), 20)

    assert result.answer == "free"
    assert [one.status for one in details(file_store, result).model_attempts] == [
        "failed",
        "committed",
    ]


async def test_a_model_over_its_time_is_unavailable_and_what_it_streamed_is_kept(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    async def hang(_request: ModelRequest, sink: ModelSink) -> ModelResponse:
        await sink.text("let me think")
        await asyncio.Event().wait()
        raise AssertionError("it was cancelled")

    async with running(desk(Answers([hang, text("in time")]), model_timeout_s=0.3)):
        result = await run_turn(client, task_queue)

    found = details(file_store, result)
    assert result.answer == "in time"
    assert [one.error_code for one in found.model_attempts] == ["model_unavailable", None]
    assert [one.text for one in found.aborted_partials] == ["let me think"]


async def test_a_sink_that_is_kept_takes_nothing_after_its_response(
    client: Client, task_queue: str, running: Running
) -> None:
    kept: list[ModelSink] = []

    async def keep(_request: ModelRequest, sink: ModelSink) -> ModelResponse:
        kept.append(sink)
        await sink.text("in time")
        return text("in time")

    async with running(desk(Answers(keep))):
        await run_turn(client, task_queue)
        with pytest.raises(errors.SinkClosed):
            await kept[0].text("late")
        with pytest.raises(errors.SinkClosed):
            await kept[0].thinking("late")


async def test_a_sink_that_is_kept_takes_nothing_after_a_cancellation(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    kept: list[ModelSink] = []
    streams, over = asyncio.Event(), asyncio.Event()

    async def hang(_request: ModelRequest, sink: ModelSink) -> ModelResponse:
        kept.append(sink)
        await sink.text("so far")
        streams.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()
        raise AssertionError("it was cancelled")

    async with running(desk(Answers(hang))):
        handle = await begin(client, task_queue)
        await asyncio.wait_for(streams.wait(), 20)
        await handle.cancel()
        result = await asyncio.wait_for(handle.wait(), 20)
        await asyncio.wait_for(over.wait(), 20)
        with pytest.raises(errors.SinkClosed):
            await kept[0].text("late")

    assert result.status == "cancelled"
    # What was accepted before the cancellation is not lost.
    aborted = Reader(file_store).details(handle.turn_id)
    assert aborted is not None
    assert [one.text for one in aborted.aborted_partials] == ["so far"]


async def test_a_turn_that_uses_up_its_steps_fails_with_every_call_answered(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    model = Answers(*[calls(call("look"))] * 3)
    async with running(desk(model)):
        result = await run_turn(client, task_queue, limits={"model_steps_max": 2})
        await assert_next_turn_is_valid(client, task_queue, model)

    assert (result.status, result.stop_reason) == ("failed", "step_limit")
    assert [one.step for one in model.requests[:-1]] == [1, 2]
    assert [one.status for one in operations(file_store, result)] == ["ok", "ok"]
    marker = model.requests[-1].messages[-2].text
    assert "step_limit" in marker
    assert marker.count("look: took effect") == 2


async def test_a_turn_may_use_exactly_its_steps(
    client: Client, task_queue: str, running: Running
) -> None:
    model = Answers(calls(call("look")), text("done"))
    async with running(desk(model)):
        result = await run_turn(client, task_queue, limits={"model_steps_max": 2})

    assert result.answer == "done"


async def test_a_turn_of_another_size_of_limit_is_another_request(
    client: Client, task_queue: str, running: Running
) -> None:
    model = Answers(text("done"))
    async with running(desk(model)):
        await run_turn(client, task_queue, limits={"model_steps_max": 2})
        other = request(limits={"model_steps_max": 3})
        failure = await failure_of(await start_raw(client, task_queue, other))

    assert failure.type == "request_conflict"
