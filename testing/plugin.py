"""The pytest plugin: fixtures with a real Temporal server, a ledger and a task queue of one's own.

All of them are plain functions, so they work under every mode and loop scope of pytest-asyncio. It
must not set options, markers or hooks of its own. (PYTEST_DONT_REWRITE: it has nothing to rewrite.)
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.worker import Worker

    from perdure.cli.dev_server import DevServer
    from perdure.stores import Store
    from perdure.testing.loop_thread import LoopThread
    from perdure.testing.stage import Stage


@pytest.fixture(scope="session")
def _perdure_loop() -> "Iterator[LoopThread]":
    from perdure.testing.loop_thread import LoopThread

    with LoopThread() as loop:
        yield loop


@pytest.fixture(scope="session")
def perdure_server(
    _perdure_loop: "LoopThread", tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[DevServer]":
    """A real Temporal server for the whole run, in memory and on a free port."""
    from perdure.cli.dev_server import DevServer, search_attribute_arguments

    server = DevServer(
        ui=False,
        log=tmp_path_factory.mktemp("perdure") / "temporal.log",
        extra_arguments=search_attribute_arguments(),
    )
    _perdure_loop.run(server.start())
    yield server
    _perdure_loop.run(server.stop())


@pytest.fixture(scope="session")
def perdure_client(perdure_server: "DevServer", _perdure_loop: "LoopThread") -> "Client":
    """A client of that server, usable from any event loop."""
    from temporalio.client import Client

    return _perdure_loop.run(Client.connect(perdure_server.address))


@pytest.fixture
def perdure_folder(tmp_path: Path) -> Path:
    """Where this test's ledger and the logs of its worker processes are."""
    folder = tmp_path / "perdure"
    folder.mkdir()
    return folder


@pytest.fixture
def perdure_store(perdure_folder: Path) -> "Iterator[Store]":
    """An empty ledger of this test, in a SQLite file."""
    from perdure.stores import open_store

    store = open_store(f"sqlite:///{perdure_folder}/ledger.db")
    yield store
    store.close()


@pytest.fixture
def perdure_task_queue() -> str:
    """A task queue that no other test uses."""
    return f"queue-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def perdure_stage(
    perdure_client: "Client",
    perdure_store: "Store",
    perdure_task_queue: str,
    perdure_folder: Path,
    _perdure_loop: "LoopThread",
) -> "Iterator[Stage]":
    """Workers and turns of this test, on all of the above."""
    from perdure.testing.stage import Stage

    stage = Stage(perdure_client, perdure_store, perdure_task_queue, perdure_folder)
    yield stage
    _perdure_loop.run(stage.close())


@pytest.fixture
def perdure_worker(
    perdure_stage: "Stage",
) -> "Callable[..., AbstractAsyncContextManager[Worker]]":
    """A worker in this process: `async with perdure_worker(app):`."""
    return perdure_stage.worker
