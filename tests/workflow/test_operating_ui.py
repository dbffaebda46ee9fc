"""What an operator finds in the Temporal UI: a timeline that names recoveries, search attributes,
failures that say what to do next.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness.processes import WorkerProcess, until
from harness.turns import (
    Answers,
    begin,
    call,
    calls,
    failure_of,
    run_turn,
    start_raw,
    text,
)
from harness.turns import request as turn_request
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHandle

from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.agents import Tool
from perdure.cli.dev_server import DevServer, search_attribute_arguments
from perdure.contracts.errors import ModelUnavailable
from perdure.stores import Store

pytestmark = pytest.mark.server

Running = Any


def desk(model: Answers, *tools: Tool) -> App:
    """One agent with these tools."""
    return App([Agent("desk", model, tools=tools)])


async def current_details(handle: WorkflowHandle[Any, Any]) -> str:
    """What the UI shows: the built-in query for the workflow's own description."""
    metadata = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    return str(metadata.current_details)


@tool(replay=ReplaySafety.SAFE)
async def look() -> str:
    """Looks."""
    return "seen"


async def test_an_ordinary_turn_has_a_short_timeline_without_any_text_of_the_conversation(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    async with running(desk(Answers(calls(call("look")), text("SECRET answer")), look)):
        turn = await begin(client, task_queue, "SECRET question")
        await turn.wait()
        shown = await current_details(client.get_workflow_handle(turn.workflow_id))

    lines = [line[11:] for line in shown.splitlines() if line.startswith("- ")]
    assert lines == [
        "step 1: the model asked for `look`",
        "`look` (safe): ok",
        "**completed** (answered)",
    ]
    assert turn.turn_id in shown
    assert "SECRET" not in shown


async def test_errors_of_the_model_and_the_way_out_are_named(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    broken = ModelUnavailable("it is down", retry_after_s=0.01)
    async with running(desk(Answers([broken, broken, text("done")]), look)):
        turn = await begin(client, task_queue)
        await turn.wait()
        shown = await current_details(client.get_workflow_handle(turn.workflow_id))
    async with running(desk(Answers([broken]), look)):
        handle = await start_raw(client, task_queue, turn_request(request_id="r2"))
        failure = await failure_of(handle)
        failed = await current_details(handle)

    assert "the model reported an error 2x" in shown
    assert "**model_failed**" in failed
    assert "**failed**: model_failed" in failed
    assert "model_unavailable after 4 tries" in failure.message
    assert "send the message as a new request" in failure.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("look", "`look` (safe): **rerun** (generation 2); ok"),
        ("pay", "`pay` (keyed): **rerun** (generation 2); ok"),
        ("ship", "`ship` (reconciled): **reconciled**: it had taken effect; ok"),
        ("send", "`send` (unsafe): **interrupted**: its worker was lost; it may have taken effect"),
    ],
)
async def test_a_lost_worker_and_what_followed_are_named_for_each_replay_safety(
    client: Client, server: DevServer, task_queue: str, tmp_path: Path, name: str, said: str
) -> None:
    options = {"address": server.address, "task_queue": task_queue}
    victim = WorkerProcess(tmp_path, **options, PERDURE_FAULT_HOLD=name)
    async with victim, WorkerProcess(tmp_path, **options, PERDURE_FAULT_STANDBY="1") as second:
        turn = await begin(client, task_queue, f"use {name}", agent="fault")
        await until(lambda: (tmp_path / f"holding.{name}").exists())
        victim.kill()
        second.go()
        await asyncio.wait_for(turn.wait(), 60)
        shown = await current_details(client.get_workflow_handle(turn.workflow_id))

    assert said in shown


@pytest.mark.slow
async def test_search_attributes_are_set_where_the_server_knows_them(
    file_store: Store, running: Running, tmp_path: Path
) -> None:
    async with DevServer(ui=False, extra_arguments=search_attribute_arguments()) as own:
        client = await Client.connect(own.address)
        queue = "searchable"
        release = asyncio.Event()

        @tool
        async def hold(ctx: ToolContext) -> str:
            """Waits."""
            await release.wait()
            return "held"

        model = Answers(calls(call("hold")), text("done"))
        async with running(desk(model, hold), client=client, queue=queue):
            turn = await begin(client, queue)
            await until_listed(client, "PerdureAgent = 'desk' AND PerdureStatus = 'open'")
            release.set()
            await turn.wait()
            history = await client.get_workflow_handle(turn.workflow_id).fetch_history()
            ended = "PerdureConversation = 'c1' AND PerdureNamespace = 'default' AND "
            ended += "PerdureStatus = 'completed' AND PerdureStopReason = 'answered'"
            await until_listed(client, ended)

    assert len(history.events) <= 25


async def until_listed(client: Client, query: str) -> None:
    """Visibility is written behind the turn."""
    async with asyncio.timeout(30):
        while not [found async for found in client.list_workflows(query)]:
            await asyncio.sleep(0.1)


async def test_a_server_that_does_not_know_them_changes_nothing(
    client: Client, task_queue: str, file_store: Store, running: Running
) -> None:
    async with running(desk(Answers(text("done")))):
        result = await run_turn(client, task_queue)

    assert result.stop_reason == "answered"
