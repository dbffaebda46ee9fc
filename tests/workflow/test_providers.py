"""Whole turns with a model over HTTP, against a mock server that judges its client.

Its verdict must be clean: no ignored Retry-After, no retry storm, no answer that was cut off and
taken for whole. Each request of its log is an attempt in the ledger.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from harness.processes import WorkerProcess
from harness.provider_app import look
from harness.provider_mock import Llmock
from harness.turns import begin, details, run_turn
from temporalio.client import Client

from perdure import Agent, App
from perdure.cli.dev_server import DevServer
from perdure.contracts.turn import TurnResult
from perdure.settings import Settings
from perdure.stores import Store, open_store

pytestmark = [pytest.mark.server, pytest.mark.slow]

Running = Callable[..., Any]
PROTOCOLS = ["openai", "openai-responses", "anthropic"]
MODELS = {"openai": "gpt-4o-mini", "openai-responses": "gpt-4o", "anthropic": "claude-3-opus"}
# No worker is lost here, so a busy machine may take its time.
PATIENT = Settings(heartbeat_timeout_s=5, grace_s=1, cancel_grace_s=1)
SAID = {"type": "reply", "text": "Paris is in France, and it is sunny today."}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Llmock]:
    """One mock server for this file. It streams slowly enough to see that a client hangs up."""
    folder = tmp_path_factory.mktemp("llmock")
    async with Llmock(folder, "--stream-chunk-delay-ms", "25") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def mock(started: Llmock) -> Llmock:
    """It, with an empty log."""
    await started.reset()
    return started


def desk(mock: Llmock, protocol: str, **options: Any) -> App:
    """One agent with one tool, whose model is the mock server's."""
    agent = Agent("desk", f"mock:{MODELS[protocol]}", "Be brief.", [look], **options)
    return App([agent], endpoints={"mock": mock.endpoint(protocol)})


async def assert_all_accounted_for(mock: Llmock, store: Store, *results: TurnResult) -> None:
    """Each request is an attempt, each attempt a request, and the judge has nothing to say."""
    attempts = [one for result in results for one in details(store, result).model_attempts]
    ended = [one for one in attempts if one.status != "lost"]
    # An attempt may be lost before it has asked.
    assert len(ended) <= len(await mock.requests()) <= len(attempts)
    assert await mock.verdict() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_turn_with_a_tool_is_two_requests_with_usage(
    protocol: str,
    client: Client,
    task_queue: str,
    mock: Llmock,
    file_store: Store,
    running: Running,
) -> None:
    async with running(desk(mock, protocol), PATIENT):
        result = await run_turn(client, task_queue)

    assert (result.status, result.stop_reason) == ("completed", "answered")
    assert result.usage.input_tokens > 0
    assert result.usage.output_tokens > 0
    (operation,) = details(file_store, result).operations
    second = (await mock.requests())[1]["body"]
    assert operation.operation_id in str(second)
    assert "seen" in str(second)
    await assert_all_accounted_for(mock, file_store, result)


PASSING: list[dict[str, Any]] = [
    {"type": "fail", "status": 429, "retry_after": 1},
    {"type": "fail", "status": 500},
    {"type": "fail", "status": 503, "retry_after": 0.2},
    {"type": "fail", "status": 529},
    {"type": "stream_fault", "kind": "disconnect", "after_chunks": 3},
    {"type": "stream_fault", "kind": "truncate", "after_chunks": 3},
    {"type": "stream_fault", "kind": "malformed", "after_chunks": 3},
]


@pytest.mark.parametrize(
    "fault", PASSING, ids=lambda fault: str(fault.get("status", fault.get("kind")))
)
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_a_fault_that_passes_costs_one_more_request(
    protocol: str,
    fault: dict[str, Any],
    client: Client,
    task_queue: str,
    mock: Llmock,
    file_store: Store,
    running: Running,
) -> None:
    await mock.tell(fault, SAID | {"times": 2})
    async with running(desk(mock, protocol), PATIENT):
        result = await run_turn(client, task_queue)

    assert (result.status, result.answer) == ("completed", SAID["text"])
    seen = details(file_store, result)
    assert [one.status for one in seen.model_attempts] == ["failed", "committed"]
    assert len(await mock.requests()) == 2
    await assert_all_accounted_for(mock, file_store, result)


async def test_a_stream_that_stalls_ends_with_the_agents_time_out(
    client: Client, task_queue: str, mock: Llmock, file_store: Store, running: Running
) -> None:
    stall = {"type": "stream_fault", "kind": "stall", "after_chunks": 2, "stall_seconds": 30}
    await mock.tell(stall, SAID | {"times": 2})
    async with running(desk(mock, "openai", model_timeout_s=2), PATIENT):
        result = await run_turn(client, task_queue)

    assert (result.status, result.answer) == ("completed", SAID["text"])
    assert len(details(file_store, result).model_attempts) == 2
    await assert_all_accounted_for(mock, file_store, result)


async def test_a_provider_that_is_down_is_asked_four_times_and_the_conversation_goes_on(
    client: Client, task_queue: str, mock: Llmock, file_store: Store, running: Running
) -> None:
    await mock.tell({"type": "fail", "status": 503, "retry_after": 0.1, "times": None})
    async with running(desk(mock, "openai"), PATIENT):
        failed = await run_turn(client, task_queue)
        await mock.recover()
        result = await run_turn(client, task_queue, request_id="r2")

    assert (failed.status, failed.stop_reason) == ("failed", "model_failed")
    assert len(details(file_store, failed).model_attempts) == 4
    assert result.status == "completed"
    await assert_all_accounted_for(mock, file_store, failed, result)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "fail", "status": 401}, "model_credentials_refused"),
    ({"type": "fail", "status": 404}, "model_unknown"),
    ({"type": "fail", "status": 422}, "model_refused"),
    ({"type": "fail", "status": 400, "code": "context_length_exceeded"}, "model_context_overflow"),
    ({"type": "reply", "text": "no", "finish_reason": "content_filter"}, "model_content_refused"),
]


@pytest.mark.parametrize(("fault", "code"), REFUSED, ids=[code for _, code in REFUSED])
async def test_what_no_retry_can_mend_is_asked_once(
    fault: dict[str, Any],
    code: str,
    client: Client,
    task_queue: str,
    mock: Llmock,
    file_store: Store,
    running: Running,
) -> None:
    await mock.tell(fault)
    async with running(desk(mock, "openai"), PATIENT):
        result = await run_turn(client, task_queue)

    assert (result.status, result.stop_reason) == ("failed", "model_failed")
    (attempt,) = details(file_store, result).model_attempts
    assert attempt.error_code == code
    await assert_all_accounted_for(mock, file_store, result)


async def test_a_rate_limit_of_an_hour_is_waited_for_and_can_be_cancelled(
    client: Client, task_queue: str, mock: Llmock, file_store: Store, running: Running
) -> None:
    await mock.tell({"type": "fail", "status": 429, "retry_after": 3600, "times": None})
    async with running(desk(mock, "openai"), PATIENT):
        handle = await begin(client, task_queue)
        workflow = client.get_workflow_handle(handle.workflow_id)
        async with asyncio.timeout(45):
            while not (wait_s := await _wait_until_retry_s(workflow)):
                await asyncio.sleep(0.05)
        await workflow.cancel()
        result = await asyncio.wait_for(handle.wait(), 45)

    assert 3590 < wait_s < 3610
    assert result.status == "cancelled"
    await assert_only_gave_up(mock)


async def _wait_until_retry_s(workflow: Any) -> float:
    described = (await workflow.describe()).raw_description
    for pending in described.pending_activities:
        if pending.HasField("last_failure") and pending.HasField("next_attempt_schedule_time"):
            due = pending.next_attempt_schedule_time.ToDatetime()
            return float((due - pending.last_attempt_complete_time.ToDatetime()).total_seconds())
    return 0.0


async def assert_only_gave_up(mock: Llmock) -> None:
    """One request was made, and whoever cancelled a turn has given up on purpose."""
    assert len(await mock.requests()) == 1
    assert [finding.split(":")[0] for finding in await mock.verdict()] == ["gave_up"]


@pytest.mark.parametrize("kind", ["unknown_tool", "malformed_arguments"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_broken_call_is_answered_to_the_model(
    protocol: str,
    kind: str,
    client: Client,
    task_queue: str,
    mock: Llmock,
    file_store: Store,
    running: Running,
) -> None:
    await mock.tell({"type": "tool_fault", "kind": kind})
    async with running(desk(mock, protocol), PATIENT):
        result = await run_turn(client, task_queue)

    assert result.status == "completed"
    (operation,) = details(file_store, result).operations
    assert operation.status == "refused"
    assert "not executed" in str((await mock.requests())[1]["body"])
    await assert_all_accounted_for(mock, file_store, result)


async def test_an_answer_at_its_length_is_kept_and_says_so(
    client: Client, task_queue: str, mock: Llmock, file_store: Store, running: Running
) -> None:
    await mock.tell({"type": "reply", "text": "Paris is", "finish_reason": "length"})
    async with running(desk(mock, "openai"), PATIENT):
        result = await run_turn(client, task_queue)

    assert (result.stop_reason, result.answer) == ("length", "Paris is")
    await assert_all_accounted_for(mock, file_store, result)


async def test_a_part_that_the_provider_cannot_take_is_refused_without_a_request(
    client: Client, task_queue: str, mock: Llmock, file_store: Store, running: Running
) -> None:
    part = {"type": "media", "url": "https://example.com/a.pdf", "media_type": "application/pdf"}
    async with running(desk(mock, "openai"), PATIENT):
        result = await run_turn(client, task_queue, {"parts": [part]})

    (attempt,) = details(file_store, result).model_attempts
    assert attempt.error_code == "model_part_unsupported"
    assert await mock.requests() == []


async def test_each_request_of_a_killed_worker_is_an_attempt(
    client: Client,
    server: DevServer,
    task_queue: str,
    mock: Llmock,
    tmp_path: Path,
) -> None:
    stall = {"type": "stream_fault", "kind": "stall", "after_chunks": 2, "stall_seconds": 60}
    await mock.tell(stall, SAID | {"times": 2})
    options: dict[str, Any] = {
        "address": server.address,
        "task_queue": task_queue,
        "app": "provider_app:app",
        "PERDURE_MODEL_URL": f"{mock.url}/v1",
    }
    holding = WorkerProcess(tmp_path, **options, failpoints="model.streamed=hold")
    async with holding:
        handle = await begin(client, task_queue)
        await holding.reached("model.streamed")
        async with WorkerProcess(tmp_path, **options):
            holding.kill()
            result = await asyncio.wait_for(handle.wait(), 60)

    store = open_store(f"sqlite:///{tmp_path}/ledger.db")
    try:
        assert (result.status, result.answer) == ("completed", SAID["text"])
        attempts = details(store, result).model_attempts
        assert [one.status for one in attempts] == ["lost", "committed"]
        assert len(await mock.requests()) == 2
        await assert_all_accounted_for(mock, store, result)
    finally:
        store.close()
