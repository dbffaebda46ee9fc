"""Crashing a real worker process at a named point of a turn, and what that leaves behind.

A victim is the only worker while the turn gets to the point and announces it; a successor that is
up but idle is then let in, and the victim gets its signal. Nothing is judged here.
"""

import asyncio
import contextlib
import signal
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from temporalio.client import Client

from harness.processes import WorkerProcess, effects, model_calls, until
from harness.turns import activities_of
from perdure.client import TurnHandle, start
from perdure.contracts.calls import SETTLE
from perdure.contracts.conversation import ConversationState
from perdure.contracts.events import LedgerEvent
from perdure.contracts.messages import Message
from perdure.contracts.turn import TurnResult
from perdure.contracts.views import OperationView, PartialView, TurnDetails
from perdure.stores import open_store
from perdure.stores.queries import Reader

SAFETIES = {"look": "SAFE", "pay": "KEYED", "ship": "RECONCILED", "send": "UNSAFE"}
# A frozen worker keeps its polls: Temporal hands it tasks that only time-outs bring back.
TURN_S = 170.0
GRACE_S = 1.0
# How much later than its own clock says a busy worker may notice that its grace has ended.
LAG_S = 1.0
_STARTING = asyncio.Semaphore(1)


class Signal(StrEnum):
    """What happens to the victim at the point."""

    NONE = "none"
    KILL = "SIGKILL"
    TERM = "SIGTERM"
    # Frozen until the turn has ended without it; then it goes on: a zombie.
    STOP = "SIGSTOP"
    # Frozen with the database's lock in its hands until its successor has met the lock; then it
    # goes on, or is killed.
    STOP_LOCKED = "SIGSTOP locked"
    KILL_LOCKED = "SIGKILL locked"


class Where(StrEnum):
    """Which part of the victim stands still at the point."""

    STORE = "a thread of the store; the event loop and the signs of life go on"
    LOOP = "the event loop, and with it the signs of life"
    TOOL = "the tool, in its effect"
    STREAM = "the model, in its stream"
    NOTHING = "nothing: the acknowledgement of a commit is lost"


@dataclass(frozen=True)
class Point:
    """A point of a turn: `NAME`, `NAME@VISIT`, or `NAME=error` for a lost acknowledgement."""

    name: str
    where: Where
    # None: the turn uses the tool of the case.
    message: str | None = None

    @property
    def failpoint(self) -> str:
        """The failpoint's name, empty where the tool or the model itself holds."""
        return "" if self.where in (Where.TOOL, Where.STREAM) else self._base

    @property
    def failpoints(self) -> str:
        """The victim's `PERDURE_FAILPOINTS`."""
        if not self.failpoint:
            return ""
        _, _, visit = self.name.partition("@")
        action = "error" if self.where is Where.NOTHING else "hold"
        return f"{self._base}={action}@{visit or 1}"

    @property
    def gives_up(self) -> bool:
        """Whether a stopping worker gives up waiting here, although its store's thread goes on."""
        return self.name in ("settle_call.before", "settle_call.committed")

    @property
    def _base(self) -> str:
        return self.name.partition("@")[0].partition("=")[0]


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    point: Point
    tool: str
    signal: Signal

    def __str__(self) -> str:
        words = (self.point.name, self.tool, self.signal.value)
        return "-".join(words).replace(" ", "_")

    @property
    def message(self) -> str:
        """What the user says."""
        return self.point.message or f"use {self.tool}"


@dataclass(frozen=True)
class Seen:
    """What a case has left behind. `late_effects` of `effects` started after the turn's end.

    That the events are there means that their chain was checked.
    """

    result: TurnResult
    details: TurnDetails
    events: list[LedgerEvent]
    transcript: list[Message]
    conversation: ConversationState
    partials: list[PartialView]
    activities: list[str]
    effects: list[dict[str, Any]]
    late_effects: int
    model_calls: Counter[int]
    victim_exit: int | None

    @property
    def operation(self) -> OperationView | None:
        """The turn's only call, if it has one."""
        (only,) = self.details.operations or (None,)
        return only

    @property
    def given_up(self) -> bool:
        """Whether the workflow closed the call because no worker came to run it."""
        return SETTLE.name in self.activities


class Crash:
    """One case being run. With `owes_late_result`, the zombie is waited for until it paid."""

    def __init__(
        self, case: Case, client: Client, address: str, folder: Path, *, owes_late_result: bool
    ) -> None:
        self.case = case
        self.folder = folder
        self._client = client
        self._address = address
        self._queue = f"crash-{uuid.uuid4().hex[:8]}"
        self._owes_late_result = owes_late_result
        self.workers: list[WorkerProcess] = []
        self.victim = self._worker(
            failpoints=case.point.failpoints,
            PERDURE_FAULT_HOLD=case.tool if case.point.where is Where.TOOL else "",
        )
        self.successor = self._worker(PERDURE_FAULT_STANDBY="1")
        self._exit: int | None = None
        self._late_effects = 0

    def _worker(self, **environment: str) -> WorkerProcess:
        worker = WorkerProcess(
            self.folder, address=self._address, task_queue=self._queue, **environment
        )
        self.workers.append(worker)
        return worker

    async def run(self) -> Seen:
        """Crash the victim at the point; returns what is there when both have done their work."""
        self.folder.mkdir(parents=True)
        try:
            # One case at a time: most of a start is computing, most of all else is waiting.
            async with _STARTING, asyncio.TaskGroup() as starting:
                for worker in self.workers:
                    starting.create_task(worker.start())
            with contextlib.closing(open_store(f"sqlite:///{self.folder}/ledger.db")) as store:
                self.reader = Reader(store)
                self.handle = await self._begin()
                await self._announced()
                if self.case.signal is not Signal.NONE:
                    self.successor.go()
                await _DO[self.case.signal](self)
                return await self._seen()
        finally:
            for worker in self.workers:
                worker.kill()

    async def _begin(self) -> TurnHandle:
        request = {
            "agent": "fault",
            "conversation_id": self._queue,
            "request_id": "r1",
            "message": self.case.message,
        }
        return await start(self._client, request, task_queue=self._queue)

    async def _announced(self) -> None:
        match self.case.point.where:
            case Where.TOOL:
                await until((self.folder / f"holding.{self.case.tool}").exists)
            case Where.STREAM:
                await until(lambda: self.reader.partials(self.handle.turn_id))
            case _:
                await self.victim.reached(self.case.point.failpoint)

    def _let_go(self) -> None:
        (self.folder / "release").touch()
        self.victim.release(self.case.point.failpoint)

    async def _ended(self) -> TurnResult:
        return await asyncio.wait_for(self.handle.wait(), TURN_S)

    async def leave_alone(self) -> None:
        """Nothing dies: the lost acknowledgement is all that happens."""
        await self._ended()

    async def kill(self) -> None:
        """SIGKILL."""
        self.victim.kill()
        await self._ended()

    async def terminate(self) -> None:
        """SIGTERM, and the grace ends with the work unfinished."""
        self.victim.signal(signal.SIGTERM)
        point = self.case.point
        if point.where is Where.LOOP:
            # It cannot notice the signal; whoever supervises it kills it after the grace.
            await asyncio.sleep(GRACE_S + LAG_S)
            await self.kill()
            return
        if point.gives_up:
            # The activity ends while T2 is still under way; the victim itself lasts until then.
            await self._ended()
        elif point.where is Where.STORE:
            await until(lambda: "worker stops" in self.victim.log)
            # That the grace passes is the case itself: nothing is waited for by it.
            await asyncio.sleep(GRACE_S + LAG_S)
        if point.where is Where.STORE:
            self._let_go()
        self._exit = await self.victim.ended()
        await self._ended()

    async def freeze(self) -> None:
        """SIGSTOP until the turn has ended, then SIGCONT; the zombie does what it still does."""
        self.victim.freeze()
        await self._ended()
        before = len(effects(self.folder))
        self._let_go()
        self.victim.thaw()
        if self._owes_late_result:
            await until(lambda: self._details().late_results)
        # A graceful stop waits for whatever else the zombie has to do.
        self._exit = await self.victim.terminate()
        self._late_effects = len(effects(self.folder)) - before

    async def freeze_with_lock(self) -> None:
        """SIGSTOP until the successor has met the lock, then SIGCONT."""
        await self._meet_lock()
        self._let_go()
        self.victim.thaw()
        await self._ended()
        self._exit = await self.victim.terminate()

    async def kill_with_lock(self) -> None:
        """SIGSTOP until the successor has met the lock, then SIGKILL."""
        await self._meet_lock()
        await self.kill()

    async def _meet_lock(self) -> None:
        self.victim.freeze()
        await until(lambda: "database is locked" in self.successor.log, TURN_S)
        turn = self.reader.turn(self.handle.turn_id)
        assert turn is None or turn.ended_at is None

    def _details(self) -> TurnDetails:
        found = self.reader.details(self.handle.turn_id)
        assert found is not None
        return found

    async def _seen(self) -> Seen:
        workflow = self._client.get_workflow_handle(self.handle.workflow_id)
        namespace, conversation = self.handle.key.namespace, self.handle.key.conversation_id
        transcript = self.reader.transcript(namespace, conversation)
        return Seen(
            result=await self._ended(),
            details=self._details(),
            events=[entry.event for entry in self.reader.turn_events(self.handle.turn_id)],
            transcript=[entry.message for entry in transcript],
            conversation=self.reader.conversation(namespace, conversation),
            partials=self.reader.partials(self.handle.turn_id),
            activities=activities_of(await workflow.fetch_history()),
            effects=effects(self.folder),
            late_effects=self._late_effects,
            model_calls=model_calls(self.folder),
            victim_exit=self._exit,
        )


class SecondCrash(Crash):
    """The successor is killed too, at `NAME` or `NAME@VISIT`; a third worker goes on."""

    def __init__(
        self, case: Case, client: Client, address: str, folder: Path, *, then: str
    ) -> None:
        super().__init__(case, client, address, folder, owes_late_result=False)
        self._then, _, visit = then.partition("@")
        self.successor.fail_at(f"{self._then}=hold@{visit or 1}")
        self.third = self._worker(PERDURE_FAULT_STANDBY="1")

    async def kill(self) -> None:
        """SIGKILL, twice."""
        self.victim.kill()
        await self.successor.reached(self._then)
        self.third.go()
        self.successor.kill()
        await self._ended()


_DO: dict[Signal, Callable[[Crash], Awaitable[None]]] = {
    Signal.NONE: lambda crash: crash.leave_alone(),
    Signal.KILL: lambda crash: crash.kill(),
    Signal.TERM: lambda crash: crash.terminate(),
    Signal.STOP: lambda crash: crash.freeze(),
    Signal.STOP_LOCKED: lambda crash: crash.freeze_with_lock(),
    Signal.KILL_LOCKED: lambda crash: crash.kill_with_lock(),
}


class Campaign:
    """Runs cases ahead of the tests that judge them, `width` at once: most of a case is waiting.

    With a width of 1, a case is run when it is asked for: another process may judge the others.
    """

    def __init__(
        self, run: Callable[[Case], Coroutine[Any, Any, Seen]], cases: list[Case], width: int
    ) -> None:
        self._run = run
        self._cases = cases
        self._room = asyncio.Semaphore(width)
        self._ahead = width > 1
        self._tasks: dict[Case, asyncio.Task[Seen]] = {}

    async def seen(self, case: Case) -> Seen:
        """What the case has left behind."""
        for wanted in self._cases if self._ahead else [case]:
            if wanted not in self._tasks:
                self._tasks[wanted] = asyncio.create_task(self._run_in_room(wanted))
        return await self._tasks[case]

    async def close(self) -> None:
        """Stop what still runs."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run_in_room(self, case: Case) -> Seen:
        async with self._room:
            return await self._run(case)
