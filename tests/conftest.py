"""Fixtures that every room shares: one real Temporal server, stores, workers in this process."""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker, WorkerConfig

from perdure import App
from perdure.cli.dev_server import DevServer
from perdure.settings import Settings
from perdure.stores import Store, open_store
from perdure.worker import PerdurePlugin

hypothesis.settings.register_profile("perdure", deadline=None)
hypothesis.settings.load_profile("perdure")

FAST = Settings(heartbeat_timeout_s=1.0, grace_s=1.0, cancel_grace_s=1.0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server() -> AsyncGenerator[DevServer]:
    """The one real Temporal server of this run, in memory."""
    async with DevServer(ui=False) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(server: DevServer) -> Client:
    """A client of it, as a user connects: without the test kit's interceptors."""
    return await Client.connect(server.address)


@pytest.fixture
def task_queue() -> str:
    """A task queue that no other test uses."""
    return f"queue-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """One suite for every store."""
    url = "sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"
    opened = open_store(url)
    yield opened
    opened.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[Store]:
    """A store in a file, for tests that need one only."""
    opened = open_store(f"sqlite:///{tmp_path}/ledger.db")
    yield opened
    opened.close()


Running = Callable[..., AsyncIterator[Worker]]


class Only(PerdurePlugin):
    """A worker of a deploy that lacks some activities."""

    def __init__(self, app: App, only: tuple[str, ...] | None, **options: Any) -> None:
        super().__init__(app, **options)
        self._only = only

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Keep only the activities that are named."""
        config = super().configure_worker(config)
        if self._only is not None:
            named = [
                (activity._Definition.must_from_callable(x).name, x) for x in config["activities"]
            ]
            config["activities"] = [x for name, x in named if name in self._only]
        return config


@pytest.fixture
def running(client: Client, task_queue: str, file_store: Store) -> Running:
    """`async with running(app):` is a worker in this process, on `task_queue` and `file_store`."""

    @asynccontextmanager
    async def run(
        app: App,
        settings: Settings = FAST,
        *,
        queue: str = task_queue,
        client: Client = client,
        only: tuple[str, ...] | None = None,
    ) -> AsyncIterator[Worker]:
        plugin = Only(app, only, store=file_store, settings=settings)
        async with Worker(client, task_queue=queue, plugins=[plugin]) as worker:
            yield worker

    return run
