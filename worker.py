"""The composition root: settings, store, app and Temporal become a worker.

`PerdurePlugin` lets a Temporal worker host our turns; `python worker.py --app pkg.mod:app`
is a whole worker on it, the same as `perdure worker`. Nothing else constructs these parts.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.worker import (
    PollerBehaviorAutoscaling,
    Replayer,
    Worker,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from perdure.activities.engine import Engine
from perdure.activities.registry import activities_of
from perdure.agents import App, load_app
from perdure.contracts.errors import PerdureError, SetupError
from perdure.contracts.timing import set_timing
from perdure.settings import Settings, connect, load_settings
from perdure.stores import Store, open_store
from perdure.workflows import AgentTurn

logger = logging.getLogger("perdure.worker")

PASSED_THROUGH = (
    "perdure.contracts",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
STICKY_TIMEOUT_S = 2.0
HEARTBEAT_THROTTLE_S = 1.0


def workflow_runner(hosts: WorkflowRunner | None = None) -> WorkflowRunner:
    """The runner of our workflows: the hosting worker's, through which our vocabulary passes.

    Re-importing the contracts for every workflow would cost six times the worker's time.
    """
    if hosts is not None and not isinstance(hosts, SandboxedWorkflowRunner):
        return hosts
    runner = hosts if hosts is not None else SandboxedWorkflowRunner()
    restrictions = runner.restrictions.with_passthrough_modules(*PASSED_THROUGH)
    return dataclasses.replace(runner, restrictions=restrictions)


def replayer() -> Replayer:
    """Replays recorded histories of our workflows against this program's code."""
    return Replayer(workflows=[AgentTurn], workflow_runner=workflow_runner())


class PerdurePlugin(SimplePlugin):
    """Makes a Temporal worker run an app's turns: `Worker(client, ..., plugins=[plugin])`.

    `store` is an open `Store` or the URL of one (default: `PERDURE_STORE_URL`); a store that the
    plugin opened is closed with the worker. The settings of DESIGN 5 (sticky time-out, heartbeat
    throttle, grace, poller autoscaling) are set on the hosting worker.
    """

    def __init__(
        self, app: App, *, store: Store | str | None = None, settings: Settings | None = None
    ) -> None:
        self._app = app
        self._settings = settings if settings is not None else Settings()
        self._store = store
        self._owned: Store | None = None
        self._engine: Engine | None = None
        super().__init__(  # pyright: ignore[reportUnknownMemberType] -- the SDK's own callables
            "perdure.PerdurePlugin",
            workflows=[AgentTurn],
            workflow_runner=workflow_runner,
            run_context=self._running,
        )

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Add workflow, activities and settings; opens the store if it is a URL."""
        if self._engine is not None:
            raise SetupError("one PerdurePlugin serves one worker; make another for another worker")
        set_timing(self._settings.timing)
        store = self._store
        if not isinstance(store, Store):
            store = open_store(store if store is not None else self._settings.store_url)
            self._owned = store
        settled = cast("dict[str, Any]", super().configure_worker(config))
        self._engine = Engine(
            self._app,
            store,
            settled["client"],
            previews=self._settings.previews,
            grace_s=self._settings.grace_s,
        )
        hosted = list(settled.get("activities") or [])
        settled["activities"] = [*hosted, *activities_of(self._engine)]
        settled.update(_timing_of(self._settings))
        return cast("WorkerConfig", settled)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        engine = self._engine
        if engine is None:
            # A Replayer runs workflows only.
            yield
            return
        try:
            async with self._app.dependencies() as deps:
                engine.deps = deps
                yield
        finally:
            engine.close()
            if self._owned is not None:
                self._owned.close()


def _timing_of(settings: Settings) -> WorkerConfig:
    throttle = timedelta(seconds=min(HEARTBEAT_THROTTLE_S, settings.heartbeat_timeout_s / 5))
    return WorkerConfig(
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=STICKY_TIMEOUT_S),
        max_heartbeat_throttle_interval=throttle,
        default_heartbeat_throttle_interval=throttle,
        graceful_shutdown_timeout=timedelta(seconds=settings.grace_s),
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(),
    )


async def run_worker(
    app: App,
    settings: Settings,
    *,
    client: Client | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[], Awaitable[Any] | None] | None = None,
) -> None:
    """Run a worker until `stop` is set, then let its activities end within the grace."""
    client = client if client is not None else await connect()
    plugin = PerdurePlugin(app, settings=settings)
    worker = Worker(client, task_queue=settings.task_queue, plugins=[plugin])
    stop = stop if stop is not None else asyncio.Event()
    async with worker:
        logger.info("worker ready on task queue %s", settings.task_queue)
        if on_ready is not None:
            ready = on_ready()
            if ready is not None:
                await ready
        await stop.wait()
        logger.info("worker stops; running tools have %s s", settings.grace_s)


async def _serve(app_path: str, settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_worker(load_app(app_path), settings, stop=stop)


def main(arguments: list[str] | None = None) -> int:
    """Run a worker for `--app module:attribute` until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="perdure worker", description=main.__doc__)
    parser.add_argument("--app", required=True, help="the app, as module:attribute")
    parser.add_argument("--task-queue", help="overrides PERDURE_TASK_QUEUE")
    parsed = parser.parse_args(arguments)
    try:
        settings = load_settings(task_queue=parsed.task_queue)
        logging.basicConfig(level=settings.log_level, format=LOG_FORMAT)
        # Its progress lines say nothing to who runs a worker.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        asyncio.run(_serve(parsed.app, settings))
    except PerdureError as error:
        print(f"perdure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
