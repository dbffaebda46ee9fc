"""What one test plays on: workers on a task queue and a ledger of its own, and turns.

The fixture `perdure_stage` makes one. It starts no server and must not know of pytest.
"""

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from perdure.agents import App
from perdure.client import start
from perdure.settings import Settings
from perdure.stores import Store
from perdure.stores.queries import Reader
from perdure.testing.histories import replays
from perdure.testing.turns import TURN_S, Turn
from perdure.testing.waiting import WAIT_S, until
from perdure.testing.worker_process import WAITS_S, Hold, WorkerProcess

# Made without reading the environment: a developer's own settings must not reach a test.
TEST_SETTINGS: Final = Settings.model_construct(
    heartbeat_timeout_s=float(WAITS_S),
    grace_s=float(WAITS_S),
    cancel_grace_s=float(WAITS_S),
    otel=False,
)


@asynccontextmanager
async def running_worker(
    app: App,
    *,
    client: Client,
    store: Store,
    task_queue: str,
    settings: Settings = TEST_SETTINGS,
    **options: Any,
) -> AsyncGenerator[Worker]:
    """A worker in this process; `options` are those of `temporalio.worker.Worker`."""
    from perdure.worker import PerdurePlugin

    plugins = [PerdurePlugin(app, store=store, settings=settings)]
    async with Worker(client, task_queue=task_queue, plugins=plugins, **options) as worker:
        yield worker


class Stage:
    """Workers and turns of one test. Close it when the test is over.

    `folder` has the ledger and the logs of worker processes, `reader` reads the ledger.
    """

    def __init__(self, client: Client, store: Store, task_queue: str, folder: Path) -> None:
        self.client = client
        self.store = store
        self.task_queue = task_queue
        self.folder = folder
        self.reader = Reader(store)
        self.turns: list[Turn] = []
        self._processes: list[WorkerProcess] = []
        self._workers = 0

    @asynccontextmanager
    async def worker(
        self, app: App, *, settings: Settings = TEST_SETTINGS, **options: Any
    ) -> AsyncGenerator[Worker]:
        """A worker in this process: `async with stage.worker(app):`."""
        where = {"client": self.client, "store": self.store, "task_queue": self.task_queue}
        async with running_worker(app, settings=settings, **where, **options) as worker:
            self._workers += 1
            try:
                yield worker
            finally:
                self._workers -= 1

    def worker_process(
        self, app: str, *, hold: Hold | None = None, **environment: str
    ) -> WorkerProcess:
        """A worker for `module:attribute` in a process of its own; `async with` starts it."""
        process = WorkerProcess(
            app,
            address=self.client.service_client.config.target_host,
            task_queue=self.task_queue,
            store_url=self.store.url,
            folder=self.folder,
            hold=hold,
            **environment,
        )
        self._processes.append(process)
        return process

    async def start(
        self,
        agent: str,
        message: Any,
        *,
        conversation_id: str | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> Turn:
        """Start a turn, in a new conversation unless one is named; `fields` as services send them.

        Raises InvalidRequest.
        """
        request = {
            "agent": agent,
            "message": message,
            "conversation_id": conversation_id or f"conversation-{uuid.uuid4().hex[:12]}",
            "request_id": request_id or f"request-{uuid.uuid4().hex[:12]}",
            **fields,
        }
        handle = await start(self.client, request, task_queue=self.task_queue)
        turn = Turn(handle, self.reader, self._check)
        self.turns.append(turn)
        return turn

    async def ask(
        self, agent: str, message: Any, *, timeout_s: float = TURN_S, **fields: Any
    ) -> Turn:
        """Start a turn and wait for its end; see `start` and `Turn.wait`."""
        turn = await self.start(agent, message, **fields)
        await turn.wait(timeout_s)
        return turn

    async def until(
        self,
        condition: Callable[[], object],
        timeout_s: float = WAIT_S,
        *,
        what: str = "the condition",
    ) -> None:
        """Wait until the condition holds. Raises TimeoutError, and SetupError as `Turn.wait`."""

        def held() -> object:
            found = condition()
            if not found:
                self._check()
            return found

        await until(held, timeout_s, what=what)

    async def replays(self, app: App | None = None) -> int:
        """Replay every turn that this stage has started; see `perdure.testing.replays`."""
        workflows = {turn.handle.workflow_id for turn in self.turns}
        handles = [self.client.get_workflow_handle(name) for name in sorted(workflows)]
        histories = [await handle.fetch_history() for handle in handles]
        return await replays(histories, app=app, data_converter=self.client.data_converter)

    async def close(self) -> None:
        """Kill worker processes that still run and end turns that nobody has waited for."""
        for process in self._processes:
            process.kill()
        for turn in self.turns:
            if turn.result is None:
                # One that was refused or has ended is closed already.
                with suppress(RPCError):
                    handle = self.client.get_workflow_handle(turn.handle.workflow_id)
                    await handle.terminate("the test is over")

    def _check(self) -> None:
        if self._workers or any(process.running for process in self._processes):
            return
        for process in self._processes:
            process.check()
