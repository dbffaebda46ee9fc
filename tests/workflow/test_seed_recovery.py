"""A worker is closed in the middle of a turn, and another one on the reopened store goes on.

Closing writes no outcome. Between the two, everything of the first one is gone but the ledger's
file and Temporal; whoever waits knows ids only.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.processes import model_calls
from temporalio.client import Client
from temporalio.worker import Worker

from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.activities.providers.scripted import ScriptedModel
from perdure.cli.dev_server import DevServer
from perdure.client import TurnHandle, start
from perdure.contracts.ids import TurnKey, turn_workflow_id
from perdure.contracts.messages import Message, Role, TextPart, ToolCallPart
from perdure.contracts.model import FinishReason, ModelRequest, ModelResponse, ModelSink
from perdure.contracts.turn import TurnResult, TurnStatus
from perdure.contracts.views import TurnDetails
from perdure.settings import Settings
from perdure.stores import open_store
from perdure.stores.queries import Reader
from perdure.worker import PerdurePlugin

pytestmark = [pytest.mark.server, pytest.mark.slow]

TURN_S = 60.0
# The worker is closed, not killed: nothing here waits for a heartbeat that does not come.
STEADY = Settings(heartbeat_timeout_s=5.0, grace_s=0.2, cancel_grace_s=0.2)


@dataclass
class Bench:
    """One store's file and one task queue, on which workers come and go."""

    client: Client
    address: str
    task_queue: str
    url: str

    @property
    def key(self) -> TurnKey:
        """The turn of this bench; no other test has it."""
        return TurnKey(conversation_id=self.task_queue, request_id="job-1")

    @asynccontextmanager
    async def working(self, app: App) -> AsyncIterator[Reader]:
        """A worker with a store of its own; leaving closes both."""
        store = open_store(self.url)
        plugin = PerdurePlugin(app, store=store, settings=STEADY)
        try:
            async with Worker(self.client, task_queue=self.task_queue, plugins=[plugin]):
                yield Reader(store)
        finally:
            store.close()

    async def start(self, message: str) -> None:
        """Start the turn, and forget it."""
        request = {"agent": "worker", "message": message, **self.key.model_dump()}
        await start(self.client, request, task_queue=self.task_queue)

    async def wait(self) -> TurnResult:
        """Wait for the turn as another program would: a new client, and ids only."""
        key = self.key
        workflow_id = turn_workflow_id(key.namespace, key.conversation_id, key.request_id)
        handle = TurnHandle(await Client.connect(self.address), key, workflow_id)
        return await asyncio.wait_for(handle.wait(), TURN_S)

    def transcript(self, reader: Reader) -> list[Message]:
        """The conversation so far."""
        entries = reader.transcript(self.key.namespace, self.key.conversation_id)
        return [entry.message for entry in entries]

    def left_behind(self) -> TurnDetails:
        """What the ledger's file says while no worker runs."""
        store = open_store(self.url)
        found = Reader(store).details(self.key.turn_id)
        store.close()
        assert found is not None
        return found


@pytest.fixture
def bench(client: Client, server: DevServer, task_queue: str, tmp_path: Path) -> Bench:
    return Bench(client, server.address, task_queue, f"sqlite:///{tmp_path}/ledger.db")


class EffectTool:
    """A tool whose first run reports progress, announces itself and never ends by itself."""

    def __init__(self) -> None:
        self.runs = 0
        self.started = asyncio.Event()
        self.model = CallsOnce()

    def declared(self, replay: ReplaySafety) -> App:
        """A new app that has it, with a model that calls it once."""

        @tool(replay=replay)
        async def effect(ctx: ToolContext) -> str:
            """Do it."""
            self.runs += 1
            run = self.runs
            await ctx.output("committed progress")
            if run == 1:
                self.started.set()
                await asyncio.Event().wait()
            return "effect complete"

        return App([Agent("worker", self.model, "", [effect])])


class CallsOnce:
    """Asks for the effect, and finishes with its result."""

    name = "calls-once"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Answer from what is there."""
        self.requests.append(request)
        results = _results(request.messages)
        if results:
            return ModelResponse(parts=(TextPart(text=f"finished: {results[-1]}"),))
        call = ToolCallPart(name="effect", provider_call_id="call-1")
        return ModelResponse(parts=(call,), finish_reason=FinishReason.TOOL_CALLS)


class InterruptedModel:
    """Streams a piece, announces itself and never ends by itself; the second time it answers."""

    name = "interrupted"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []
        self.started = asyncio.Event()

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Stream or answer."""
        self.requests.append(request)
        if len(self.requests) == 1:
            await sink.text("partial")
            self.started.set()
            await asyncio.Event().wait()
        return ModelResponse(parts=(TextPart(text="recovered"),))


def _results(messages: tuple[Message, ...] | list[Message]) -> list[str]:
    return [result.text for message in messages for result in message.results]


@pytest.mark.parametrize(
    ("replay", "runs"), [(ReplaySafety.UNSAFE, 1), (ReplaySafety.SAFE, 2), (ReplaySafety.KEYED, 2)]
)
async def test_a_tool_that_was_interrupted_runs_again_only_if_that_is_safe(
    bench: Bench, replay: ReplaySafety, runs: int
) -> None:
    effect = EffectTool()
    async with bench.working(effect.declared(replay)):
        await bench.start("perform effect")
        await asyncio.wait_for(effect.started.wait(), TURN_S)

    left = bench.left_behind()
    assert left.turn.status is TurnStatus.OPEN
    assert [operation.status for operation in left.operations] == [None]

    async with bench.working(effect.declared(replay)) as reader:
        result = await bench.wait()
        transcript = bench.transcript(reader)

    assert result.status is TurnStatus.COMPLETED
    assert effect.runs == runs
    [told] = _results(transcript)
    if runs == 1:
        assert "interrupted" in told
        assert told.endswith("committed progress")
    else:
        assert told == "effect complete"
    assert result.answer == f"finished: {told}"
    assert [request.step for request in effect.model.requests] == [1, 2]


async def test_text_that_was_streamed_before_the_interruption_is_kept_as_aborted(
    bench: Bench,
) -> None:
    model = InterruptedModel()
    app = App([Agent("worker", model)])
    async with bench.working(app):
        await bench.start("hello")
        await asyncio.wait_for(model.started.wait(), TURN_S)

    left = bench.left_behind()
    assert left.turn.status is TurnStatus.OPEN
    assert [attempt.status for attempt in left.model_attempts] == ["started"]

    async with bench.working(app) as reader:
        result = await bench.wait()
        details, transcript = reader.details(bench.key.turn_id), bench.transcript(reader)

    assert (result.status, result.answer) == (TurnStatus.COMPLETED, "recovered")
    assert details is not None
    [aborted] = details.aborted_partials
    assert (aborted.subject, aborted.text) == ("step1", "partial")
    first, second = model.requests
    assert second.messages == first.messages
    assert second == first.model_copy(update={"attempt": second.attempt})
    assert [(message.role, message.text) for message in transcript] == [
        (Role.USER, "hello"),
        (Role.ASSISTANT, "recovered"),
    ]


async def test_a_turn_is_answered_once_also_after_the_store_was_reopened(
    bench: Bench, tmp_path: Path
) -> None:
    def app() -> App:
        record = tmp_path / "model_calls"
        return App([Agent("worker", ScriptedModel.replies("persisted", record=record))])

    async with bench.working(app()) as reader:
        await bench.start("remember this")
        first = await bench.wait()
        assert len(bench.transcript(reader)) == 2
        await bench.start("remember this")
        again = await bench.wait()

    async with bench.working(app()) as reader:
        await bench.start("remember this")
        reopened = await bench.wait()
        transcript = bench.transcript(reader)
        events = reader.turn_events(bench.key.turn_id)

    assert (first.status, first.conversation_version) == (TurnStatus.COMPLETED, 1)
    assert first == again == reopened
    assert [message.text for message in transcript] == ["remember this", "persisted"]
    assert len(events) == 4
    assert model_calls(tmp_path) == {1: 1}
