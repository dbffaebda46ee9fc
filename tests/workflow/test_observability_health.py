"""Probes of real workers: ready, stopping, without a store."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.pages import get, ports
from harness.turns import Answers, begin, call, calls, text
from temporalio.client import Client
from temporalio.worker import Worker

from perdure import Agent, App, ReplaySafety, tool
from perdure.settings import Settings
from perdure.stores import Store, open_store
from perdure.worker import PerdurePlugin, run_worker

pytestmark = [pytest.mark.server, pytest.mark.slow]

STEADY: dict[str, Any] = {"heartbeat_timeout_s": 5.0, "grace_s": 2.0, "cancel_grace_s": 1.0}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a ledger lies that a test breaks."""
    return tmp_path / "probed.db"


async def test_a_worker_is_ready_until_it_stops_or_loses_its_store(
    client: Client, task_queue: str, place: Path
) -> None:
    (port,) = ports(1)
    entered, go = asyncio.Event(), asyncio.Event()

    @tool(replay=ReplaySafety.SAFE)
    async def wait() -> str:
        """Wait."""
        entered.set()
        await go.wait()
        return "waited"

    model = Answers(calls(call("wait")), text("done"))
    app = App([Agent("desk", model, "", [wait])])
    settings = Settings(
        **STEADY | {"grace_s": 20.0},
        task_queue=task_queue,
        store_url=f"sqlite:///{place}",
        health_port=port,
    )
    ready, stop = asyncio.Event(), asyncio.Event()
    working = asyncio.create_task(
        run_worker(app, settings, client=client, stop=stop, on_ready=ready.set)
    )
    await ready.wait()
    # Its worker stops for good, so the turn stays open: not under the id that other tests use.
    handle = await begin(client, task_queue, conversation_id="probed")
    await entered.wait()

    well = [await get(port, path) for path in ("/healthz", "/readyz", "/metrics", "/")]
    stop.set()
    async with asyncio.timeout(10):
        while (await get(port, "/readyz")) != (503, "stopping\n"):
            await asyncio.sleep(0.02)
    alive = await get(port, "/healthz")
    go.set()
    await working
    await client.get_workflow_handle(handle.workflow_id).terminate()

    assert well == [(200, "ok\n"), (200, "ok\n"), (404, "not found\n"), (404, "not found\n")]
    assert alive == (200, "ok\n")
    assert await get(port, "/healthz") == (0, "")


async def test_a_worker_without_its_store_is_not_ready_and_alive(
    client: Client, task_queue: str, place: Path
) -> None:
    (port,) = ports(1)
    store: Store = open_store(f"sqlite:///{place}")
    settings = Settings(**STEADY, metrics_port=port, health_port=port)
    async with _hosting(client, task_queue, store, settings):
        async with asyncio.timeout(10):
            while (await get(port, "/readyz")) != (200, "ok\n"):
                await asyncio.sleep(0.02)
        # The connections are closed, and what lies there now is no database.
        store.close()
        for path in place.parent.glob("probed.db*"):
            path.write_bytes(b"no database" * 500)
        async with asyncio.timeout(10):
            while (await get(port, "/readyz")) != (503, "the store does not answer\n"):
                await asyncio.sleep(0.02)
        assert await get(port, "/healthz") == (200, "ok\n")


@asynccontextmanager
async def _hosting(
    client: Client, task_queue: str, store: Store, settings: Settings
) -> AsyncGenerator[None]:
    plugin = PerdurePlugin(App([]), store=store, settings=settings)
    async with Worker(client, task_queue=task_queue, plugins=[plugin]):
        yield
