"""Whole turns as tests see them: fixed models, starting a turn, and what it has left behind."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, func, select
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowHistory
from temporalio.exceptions import ApplicationError

from perdure.client import TurnHandle, start
from perdure.contracts.messages import Message, Role, TextPart, ToolCallPart
from perdure.contracts.model import FinishReason, ModelRequest, ModelResponse, ModelSink
from perdure.contracts.turn import TurnResult
from perdure.contracts.views import OperationView, TurnDetails
from perdure.stores import Store
from perdure.stores.queries import Reader
from perdure.stores.tables import IDENTITY, METADATA

TURN_S = 45.0

Step = ModelResponse | Exception | Callable[[ModelRequest, ModelSink], Awaitable[ModelResponse]]


def text(said: str) -> ModelResponse:
    """A final answer."""
    return ModelResponse(parts=(TextPart(text=said),))


def call(name: str, /, *, call_id: str = "", raw: str | None = None, **arguments: Any) -> Any:
    """A call of a tool, for `calls`; `raw` is the text of arguments that were never parsed."""
    return ToolCallPart(
        name=name, provider_call_id=call_id, arguments=arguments, arguments_text=raw
    )


def calls(*parts: ToolCallPart) -> ModelResponse:
    """An answer that asks for calls."""
    return ModelResponse(parts=parts, finish_reason=FinishReason.TOOL_CALLS)


class Answers:
    """A model with an answer for each step; a user who says `next` gets `ok` at once.

    A step is a response, an error to raise, or a function of request and sink. It may be a list of
    those, one for each attempt; the last one repeats.
    """

    name = "answers"

    def __init__(self, *steps: Step | list[Step]) -> None:
        self.requests: list[ModelRequest] = []
        self._steps = [step if isinstance(step, list) else [step] for step in steps]

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Answer, as scripted for this step and attempt."""
        self.requests.append(request)
        said = [message.text for message in request.messages if message.role is Role.USER]
        if said[-1] == "next":
            return text("ok")
        tries = self._steps[request.step - 1]
        step = tries[min(request.attempt, len(tries)) - 1]
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, ModelResponse) else await step(request, sink)


def request(message: Any = "go", **changes: Any) -> dict[str, Any]:
    """The input of a turn."""
    base = {"agent": "desk", "conversation_id": "c1", "request_id": "r1", "message": message}
    return base | changes


async def begin(client: Client, task_queue: str, message: Any = "go", **changes: Any) -> TurnHandle:
    """Start a turn of agent `desk` as our own client does."""
    return await start(client, request(message, **changes), task_queue=task_queue)


async def run_turn(
    client: Client, task_queue: str, message: Any = "go", **changes: Any
) -> TurnResult:
    """Run a turn of agent `desk` to its end, also a failed one."""
    handle = await begin(client, task_queue, message, **changes)
    return await asyncio.wait_for(handle.wait(), TURN_S)


async def start_raw(
    client: Client, task_queue: str, *inputs: Any, workflow_id: str | None = None
) -> WorkflowHandle[Any, Any]:
    """Start the workflow as any service does, with whatever input."""
    return await client.start_workflow(
        "AgentTurn",
        args=inputs,
        id=workflow_id or f"any-{uuid.uuid4().hex}",
        task_queue=task_queue,
        result_type=dict[str, Any],
    )


async def execute(client: Client, task_queue: str, *inputs: Any, **options: Any) -> dict[str, Any]:
    """The result of the workflow as plain JSON."""
    handle = await start_raw(client, task_queue, *inputs, **options)
    return await asyncio.wait_for(handle.result(), TURN_S)


async def failure_of(handle: WorkflowHandle[Any, Any]) -> ApplicationError:
    """The failure with which a workflow ends."""
    with pytest.raises(WorkflowFailureError) as caught:
        await asyncio.wait_for(handle.result(), TURN_S)
    cause = caught.value.cause
    assert isinstance(cause, ApplicationError), cause
    return cause


def activities_of(history: WorkflowHistory) -> list[str]:
    """The activities that the workflow has scheduled, in order."""
    return [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in history.events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]


def rows(store: Store) -> dict[str, int]:
    """How many rows each table has; empty ones and the ledger's own identity are left out."""
    return store.read(_count)


def _count(tx: Connection) -> dict[str, int]:
    counts = {
        table.name: tx.execute(select(func.count()).select_from(table)).scalar_one()
        for table in METADATA.sorted_tables
        if table is not IDENTITY
    }
    return {name: count for name, count in counts.items() if count}


def details(store: Store, result: TurnResult) -> TurnDetails:
    """All that happened in a turn."""
    found = Reader(store).details(result.turn_id)
    assert found is not None
    return found


def operations(store: Store, result: TurnResult) -> tuple[OperationView, ...]:
    """The turn's calls."""
    return details(store, result).operations


def operation(store: Store, result: TurnResult) -> OperationView:
    """The turn's only call."""
    (only,) = operations(store, result)
    return only


def assert_sendable(messages: Sequence[Message]) -> None:
    """What every provider demands: each call has one result right behind it, and all is UTF-8."""
    # A lone surrogate cannot be encoded, and NaN is not JSON.
    json.dumps(
        [message.model_dump() for message in messages], ensure_ascii=False, allow_nan=False
    ).encode()
    assert not any(message.role is Role.SYSTEM for message in messages)
    ids = [call.call_id for message in messages for call in message.calls]
    assert len(set(ids)) == len(ids)
    for before, message in zip([None, *messages], messages, strict=False):
        assert any(not isinstance(part, TextPart) or part.text for part in message.parts), message
        assert all(isinstance(part.arguments, dict) for part in message.calls)
        owed = [part.call_id for part in before.calls] if before is not None else []
        assert [part.call_id for part in message.results] == owed
        assert (message.role is Role.TOOL) == bool(owed)
    assert not messages[-1].calls


async def assert_next_turn_is_valid(
    client: Client, task_queue: str, model: Answers, **changes: Any
) -> None:
    """Run another turn of the conversation and check all that its model is sent."""
    result = await run_turn(client, task_queue, "next", request_id="after", **changes)
    assert (result.status, result.answer) == ("completed", "ok")
    assert_sendable(model.requests[-1].messages)
