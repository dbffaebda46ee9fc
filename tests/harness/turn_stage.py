"""Turns on a stage: tools and a model that hold where a test wants, in this process.

Every effect is counted when it starts. It also holds what must be true of any ended turn (`sound`)
and the plain `temporal` command line, as an operator types it.
"""

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from harness.processes import POLL_S, WAIT_S, WorkerProcess, until
from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.activities.providers.scripted import ScriptedModel
from perdure.agents import BlockingToolContext, Tool
from perdure.cli.dev_server import find_temporal
from perdure.contracts import failpoints
from perdure.contracts.events import LedgerEvent, ModelAnswered, ToolCalled, ToolSettled, TurnEnded
from perdure.contracts.ids import TurnKey
from perdure.contracts.messages import Message
from perdure.contracts.turn import TurnResult
from perdure.settings import Settings
from perdure.stores import Store
from perdure.stores.queries import Reader

# Nobody dies on the stage: a busy machine must not look like a dead one, and a cancellation reaches
# a tool within the second between two heartbeats.
STEADY = Settings(heartbeat_timeout_s=5.0, grace_s=1.0, cancel_grace_s=3.0)

Handle = WorkflowHandle[Any, Any]
TOOLS = ("look", "pay", "ship", "send", "carve", "tidy")
_DONE = {"text": "done: {results}"}


def _rules(model_go: Path) -> list[dict[str, Any]]:
    return [
        *(
            {"when": f"^use {name}$", "steps": [{"calls": [{"tool": name}]}, _DONE]}
            for name in TOOLS
        ),
        {
            "when": "^use send and look$",
            "steps": [{"calls": [{"tool": "send"}, {"tool": "look"}]}, _DONE],
        },
        {
            "when": "^use look then send$",
            "steps": [{"calls": [{"tool": "look"}]}, {"calls": [{"tool": "send"}]}, _DONE],
        },
        {
            "when": "^stream$",
            "steps": [
                {"text": ["one ", "two"], "hold_file": str(model_go), "hold_after_chunks": 1}
            ],
        },
        {"when": "^fail$", "steps": [{"error": {"kind": "refused"}}]},
        {"steps": [{"text": "hello"}]},
    ]


class Stage:
    """An app of its own, and the turns that a test starts on it."""

    def __init__(self, folder: Path, client: Client, task_queue: str, store: Store) -> None:
        self.effects: Counter[str] = Counter()
        self.holds: set[str] = set()
        self.reader = Reader(store)
        self.model = ScriptedModel(_rules(folder / "model-go"))
        self.app = App([Agent("stage", self.model, "Be careful.", _tools(self))])
        self.conversation = f"conversation-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._client = client
        self._task_queue = task_queue
        self._go = threading.Event()

    async def start(
        self,
        message: str,
        request: str = "r1",
        *,
        workflow_id: str | None = None,
        **changes: Any,
    ) -> Handle:
        """Start a turn as any service does; each start has a workflow id of its own."""
        value = {
            "agent": "stage",
            "conversation_id": self.conversation,
            "request_id": request,
            "message": message,
            **changes,
        }
        workflow_id = workflow_id or f"start-{uuid.uuid4().hex[:8]}"
        await self._client.start_workflow(
            "AgentTurn", value, id=workflow_id, task_queue=self._task_queue
        )
        # Not the handle of the start: it would stay with the run that a reset replaces.
        return self._client.get_workflow_handle(workflow_id)

    def turn_id(self, request: str = "r1") -> str:
        """The id of that request's turn."""
        return TurnKey(conversation_id=self.conversation, request_id=request).turn_id

    def asked(self, request: str = "r1") -> Counter[int]:
        """How often the model was asked, by step."""
        turn_id = self.turn_id(request)
        return Counter(item.step for item in self.model.requests if item.turn_id == turn_id)

    def last_messages(self) -> tuple[Message, ...]:
        """What the model was sent last."""
        return self.model.requests[-1].messages

    def events(self, request: str = "r1") -> list[LedgerEvent]:
        """What the ledger has of the turn so far."""
        return [recorded.event for recorded in self.reader.turn_events(self.turn_id(request))]

    def sound(self, request: str = "r1") -> list[LedgerEvent]:
        """The events of an ended turn, once what is promised of any is checked (P1, P4, P8)."""
        events = self.events(request)
        assert [event for event in events if isinstance(event, TurnEnded)] == events[-1:]
        called = [event.operation_id for event in events if isinstance(event, ToolCalled)]
        results = [event.operation_id for event in events if isinstance(event, ToolSettled)]
        assert sorted(called) == sorted(set(results)) == sorted(results)
        steps = [event.step for event in events if isinstance(event, ModelAnswered)]
        assert steps == list(range(1, len(steps) + 1))
        assert self.reader.partials(self.turn_id(request)) == []
        return events

    def release(self) -> None:
        """Let everything go on that holds, and nothing hold any more."""
        self._go.set()
        (self._folder / "model-go").touch()

    async def holding(self, name: str) -> None:
        """Wait until an effect has started (and holds, if it is to)."""
        await until(lambda: self.effects[name])

    async def streaming(self, request: str = "r1") -> None:
        """Wait until text of a model that holds is durable."""
        await until(lambda: self.reader.partials(self.turn_id(request)))

    def start_effect(self, name: str, context: ToolContext | BlockingToolContext) -> bool:
        """Count an effect; says whether it is to hold. Only a first generation holds."""
        self.effects[name] += 1
        return name in self.holds and context.generation == 1

    @property
    def going_on(self) -> bool:
        """Whether what holds may go on."""
        return self._go.is_set()

    async def hold_here(self) -> None:
        """Hold without blocking the loop."""
        await until(lambda: self.going_on)


def _tools(stage: Stage) -> list[Tool]:
    @tool(replay=ReplaySafety.SAFE)
    async def look(ctx: ToolContext) -> str:
        """A read."""
        if stage.start_effect("look", ctx):
            await stage.hold_here()
        return "seen"

    @tool(replay=ReplaySafety.KEYED)
    def pay(ctx: BlockingToolContext) -> str:
        """A plain function that looks whether it is cancelled."""
        if stage.start_effect("pay", ctx):
            while not stage.going_on and not ctx.cancelled:
                stage._go.wait(POLL_S)
        return "stopped in time" if ctx.cancelled else "paid"

    async def find_shipment(ctx: ToolContext) -> str:
        return "shipped"

    @tool(replay=ReplaySafety.RECONCILED, reconcile=find_shipment)
    async def ship(ctx: ToolContext) -> str:
        """A shipment that can be looked up."""
        if stage.start_effect("ship", ctx):
            await stage.hold_here()
        return "shipped"

    @tool
    async def send(ctx: ToolContext) -> str:
        """A message that cannot be taken back."""
        await ctx.output("half sent")
        if stage.start_effect("send", ctx):
            await stage.hold_here()
        return "sent"

    @tool
    def carve(ctx: BlockingToolContext) -> str:
        """A plain function that does not look whether it is cancelled."""
        if stage.start_effect("carve", ctx):
            stage._go.wait(WAIT_S)
        return "carved"

    @tool(replay=ReplaySafety.SAFE)
    async def tidy(ctx: ToolContext) -> str:
        """A coroutine that cleans up when it is cancelled, and answers."""
        try:
            if stage.start_effect("tidy", ctx):
                await stage.hold_here()
        except asyncio.CancelledError:
            return "tidied up"
        return "tidy"

    return [look, pay, ship, send, carve, tidy]


class Gates:
    """Failpoints of this process that hold until the test opens them.

    They hold a thread of the store; the event loop, and with it every heartbeat, goes on.
    """

    def __init__(self, *names: str) -> None:
        self._reached: Counter[str] = Counter()
        self._expired: list[str] = []
        self._open = {name: threading.Event() for name in names}
        failpoints.install({name: self._action(name) for name in names})

    def _action(self, name: str) -> Callable[[], None]:
        def act() -> None:
            self._reached[name] += 1
            if not self._open[name].wait(WAIT_S):
                self._expired.append(name)

        return act

    async def reached(self, name: str, times: int = 1) -> None:
        """Wait until the point was visited that often."""
        await until(lambda: self._reached[name] >= times)

    def open(self, name: str) -> None:
        """Let all go on that wait there, and all that come."""
        self._open[name].set()

    def remove(self) -> None:
        """Open everything and leave no failpoint behind; fails if somebody waited too long."""
        for event in self._open.values():
            event.set()
        failpoints.install({})
        assert not self._expired, f"nobody opened {self._expired} in time"


def settled(events: list[LedgerEvent]) -> dict[str, tuple[str, str]]:
    """Status and text of each tool's result."""
    return {
        event.tool: (event.status.value, event.text)
        for event in events
        if isinstance(event, ToolSettled)
    }


async def status_of(handle: Handle) -> WorkflowExecutionStatus | None:
    """The status of the newest run."""
    return (await handle.describe()).status


async def cause_of(handle: Handle) -> BaseException:
    """What a workflow that does not complete fails with."""
    try:
        result = await handle.result()
    except WorkflowFailureError as failure:
        return failure.cause
    raise AssertionError(f"the workflow completed: {result['status']}")


async def result_of(handle: Handle) -> TurnResult:
    """What a workflow that completes returns."""
    return TurnResult.model_validate(await handle.result())


async def until_async(condition: Callable[[], Awaitable[Any]]) -> None:
    """Wait until a condition that has to be asked for holds."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(POLL_S)


async def pending(handle: Handle, activity_type: str) -> Any | None:
    """The newest run's pending activity of that type, if a worker runs it."""
    described = await handle.describe()
    for item in described.raw_description.pending_activities:
        if item.activity_type.name == activity_type and item.HasField("last_started_time"):
            return item
    return None


async def beats(handle: Handle, activity_type: str, for_s: float) -> None:
    """Wait until a pending activity has been heartbeating for that long."""

    async def beaten() -> bool:
        item = await pending(handle, activity_type)
        if item is None or not item.HasField("last_heartbeat_time"):
            return False
        began, last = item.last_started_time, item.last_heartbeat_time
        return (last.ToDatetime() - began.ToDatetime()).total_seconds() >= for_s

    await until_async(beaten)


async def temporal(client: Client, *words: str) -> str:
    """Run the plain `temporal` program against the server of the client."""
    process = await asyncio.create_subprocess_exec(
        str(find_temporal()),
        *words,
        "--address",
        client.service_client.config.target_host,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def reset(client: Client, handle: Handle, kind: str) -> None:
    """`temporal workflow reset` of the newest run."""
    words = ("--workflow-id", handle.id, "--type", kind, "--reason", "a test")
    await temporal(client, "workflow", "reset", *words)


@asynccontextmanager
async def worker_and_standby(
    folder: Path, address: str, task_queue: str, **fate: str
) -> AsyncGenerator[tuple[WorkerProcess, WorkerProcess]]:
    """A worker process with that fate, and one that is up and takes no work before `go`."""
    first = WorkerProcess(folder, address=address, task_queue=task_queue, **fate)
    standby = WorkerProcess(
        folder, address=address, task_queue=task_queue, PERDURE_FAULT_STANDBY="1"
    )
    try:
        await asyncio.gather(first.start(), standby.start())
        yield first, standby
    finally:
        first.kill()
        standby.kill()


async def start_fault_turn(
    client: Client, task_queue: str, message: str, conversation: str = "c1"
) -> Handle:
    """Start a turn of the app that worker processes run; its id is made of its queue's."""
    value = {
        "agent": "fault",
        "conversation_id": conversation,
        "request_id": "r1",
        "message": message,
    }
    workflow_id = f"{task_queue}-{conversation}"
    await client.start_workflow("AgentTurn", value, id=workflow_id, task_queue=task_queue)
    return client.get_workflow_handle(workflow_id)
