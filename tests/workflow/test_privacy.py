"""What people say, what tools return and what providers complain about stays in the ledger.

A canary is put into each place. With previews off, Temporal holds none but the input that the
caller itself sent in; with previews on, at most short previews; logs hold none either way.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from harness.turns import Answers, begin, call, calls, details, text
from temporalio.client import Client

from perdure import Agent, App, ReplaySafety, errors, tool
from perdure.client import TurnHandle
from perdure.contracts.model import ModelRequest, ModelResponse, ModelSink
from perdure.settings import Settings
from perdure.stores import Store
from perdure.stores.queries import Reader

pytestmark = pytest.mark.server

MESSAGE, ARGUMENT, RESULT = "canary-message", "canary-argument", "canary-result"
ANSWER, PROVIDER, RAISED, PROGRESS = (
    "canary-answer",
    "canary-provider",
    "canary-raised",
    "canary-progress",
)
EVERYWHERE = (ARGUMENT, RESULT, ANSWER, PROVIDER, RAISED, PROGRESS)


@tool(replay=ReplaySafety.SAFE)
async def find(what: str) -> str:
    """Find something."""
    return RESULT


@tool
async def fail(what: str) -> str:
    """Raise with a secret."""
    raise ValueError(RAISED)


@tool(replay=ReplaySafety.SAFE)
async def retry(what: str) -> str:
    """Report errors with a secret until the tries are used up."""
    raise errors.ToolError(RAISED, retry_after_s=0.01)


async def break_once(request: ModelRequest, sink: ModelSink) -> ModelResponse:
    """A provider that complains with somebody's text."""
    await sink.text(PROGRESS)
    raise RuntimeError(PROVIDER)


async def recorded(client: Client, handle: TurnHandle) -> str:
    """All that the history holds, payloads as they are and not as base64."""
    history = await client.get_workflow_handle(handle.workflow_id).fetch_history()
    return b"".join(event.SerializeToString() for event in history.events).decode(errors="replace")


def app() -> App:
    """An agent whose every part leaks, if anything can."""
    complains = errors.ModelUnavailable(PROVIDER, retry_after_s=0.01)
    parts = [call(name, what=ARGUMENT) for name in ("find", "fail", "retry")]
    model = Answers([complains, calls(*parts)], text(ANSWER))
    broken = Answers(*([break_once] * 2))
    tools = [find, fail, retry]
    return App([Agent("desk", model, "", tools), Agent("broken", broken, "", tools)])


@pytest.mark.parametrize("previews", [False, True])
async def test_no_canary_is_in_histories_or_logs(
    client: Client,
    task_queue: str,
    file_store: Store,
    running: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    previews: bool,
) -> None:
    caplog.set_level(logging.INFO)
    settings = Settings(heartbeat_timeout_s=5.0, grace_s=1.0, previews=previews)
    async with running(app(), settings):
        handle = await begin(client, task_queue, MESSAGE)
        result = await handle.wait()
    history = await recorded(client, handle)

    told = {item.tool: item.text or "" for item in details(file_store, result).operations}
    assert RESULT in told["find"]
    assert RAISED in told["fail"]
    assert RAISED in told["retry"]
    allowed = {ARGUMENT, ANSWER} if previews else set[str]()
    assert [canary for canary in EVERYWHERE if canary in history] == [
        canary for canary in EVERYWHERE if canary in allowed
    ]
    # The caller's own input, and the first activity that carries it.
    assert history.count(MESSAGE) == 2
    assert not [canary for canary in (MESSAGE, *EVERYWHERE) if canary in caplog.text]
    if previews:
        assert result.answer == ANSWER
    else:
        assert result.answer is None
        assert result.answer_at is not None
        assert result.turn_id in result.answer_at
    stored = Reader(file_store).turn(result.turn_id)
    assert stored is not None
    assert stored.answer == ANSWER


async def test_what_a_broken_model_raises_is_not_told(
    client: Client,
    task_queue: str,
    file_store: Store,
    running: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    settings = Settings(heartbeat_timeout_s=5.0, grace_s=1.0, previews=False)
    async with running(app(), settings):
        handle = await begin(client, task_queue, MESSAGE, agent="broken")
        result = await handle.wait()
    history = await recorded(client, handle)

    assert (result.status, result.stop_reason) == ("failed", "model_failed")
    assert not [canary for canary in EVERYWHERE if canary in history]
    assert not [canary for canary in (MESSAGE, *EVERYWHERE) if canary in caplog.text]
    aborted = details(file_store, result).aborted_partials
    assert [partial.text for partial in aborted] == [PROGRESS] * 4
