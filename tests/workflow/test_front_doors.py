"""Every way in leads to the same turn: our client, a stranger's JSON, the plain Temporal CLI."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from harness.turn_stage import temporal
from harness.turns import (
    Answers,
    call,
    calls,
    execute,
    failure_of,
    operations,
    request,
    rows,
    run_turn,
    start_raw,
    text,
)
from temporalio.client import Client

from perdure import Agent, App, tool
from perdure.contracts.errors import RequestConflict
from perdure.stores import Store

pytestmark = pytest.mark.server


@tool
async def stamp() -> str:
    """An effect that must happen once."""
    EFFECTS.append("stamp")
    return "stamped"


EFFECTS: list[str] = []


def desk() -> tuple[App, Answers]:
    """An agent with one unsafe tool, and its model."""
    EFFECTS.clear()
    model = Answers(calls(call("stamp")), text("all done"))
    return App([Agent("desk", model, "Be brief.", [stamp])]), model


async def test_the_plain_temporal_program_runs_a_turn_and_again_gets_the_same(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    app, model = desk()
    line = ["workflow", "execute", "--type", "AgentTurn", "--task-queue", task_queue]
    line += ["--input", json.dumps(request("hello")), "--output", "json"]
    async with running(app):
        first = json.loads(await temporal(client, *line))
        stored = rows(file_store)
        second = json.loads(await temporal(client, *line))

    assert first["status"] == second["status"] == "COMPLETED"
    assert first["result"] == second["result"]
    assert first["result"]["answer"] == "all done"
    assert first["result"]["usage"] is not None
    assert rows(file_store) == stored
    assert len(model.requests) == 2
    assert EFFECTS == ["stamp"]


async def test_two_starts_of_one_request_at_once_are_one_turn(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    app, model = desk()
    async with running(app):
        results = await asyncio.gather(
            *(execute(client, task_queue, request("hello")) for _ in range(4))
        )

    assert all(result == results[0] for result in results)
    assert EFFECTS == ["stamp"]
    assert [asked.step for asked in model.requests] == [1, 2]


async def test_a_string_and_the_message_object_with_it_are_the_same_request(
    client: Client, task_queue: str, running: Callable[..., Any]
) -> None:
    app, model = desk()
    async with running(app):
        first = await execute(client, task_queue, request("hello"))
        parts = {"parts": [{"type": "text", "text": "hello"}]}
        second = await execute(client, task_queue, request(parts))

    assert first == second
    assert len(model.requests) == 2


async def test_other_content_under_a_request_id_is_a_typed_conflict(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    app, _ = desk()
    async with running(app):
        await run_turn(client, task_queue, "hello")
        stored = rows(file_store)
        failure = await failure_of(await start_raw(client, task_queue, request("something else")))
        with pytest.raises(RequestConflict):
            await run_turn(client, task_queue, "something else")

    assert failure.type == "request_conflict"
    assert failure.non_retryable
    assert rows(file_store) == stored


@pytest.mark.parametrize("inputs", [(), ({"agent": "desk"}, {"phase": "model"}), (None, {})])
async def test_internal_arguments_are_refused_from_outside(
    client: Client,
    task_queue: str,
    file_store: Store,
    running: Callable[..., Any],
    inputs: tuple[Any, ...],
) -> None:
    app, model = desk()
    async with running(app):
        failure = await failure_of(await start_raw(client, task_queue, *inputs))

    assert failure.type == "invalid_request"
    assert rows(file_store) == {}
    assert model.requests == []


async def test_a_turn_may_narrow_the_tools_of_its_agent_and_never_widen_them(
    client: Client, task_queue: str, file_store: Store, running: Callable[..., Any]
) -> None:
    app, model = desk()
    async with running(app):
        widened = await start_raw(client, task_queue, request("hello", tools=["stamp", "rm"]))
        failure = await failure_of(widened)
        refused = rows(file_store)
        result = await run_turn(client, task_queue, "hello", tools=[])

    assert failure.type == "capability_denied"
    assert refused == {}
    assert model.requests[0].tools == ()
    (denied,) = operations(file_store, result)
    assert (denied.status, denied.reason) == ("refused", "capability_denied")
    assert EFFECTS == []
