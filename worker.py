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

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.worker import (
    PollerBehaviorAutoscaling,
    Replayer,
    Worker,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from perdure.activities.engine import Engine
from perdure.activities.health import Exposition, Health, Readiness
from perdure.activities.observers import Wanted, check_extras, make_observers
from perdure.activities.registry import activities_of
from perdure.activities.searchable import knows_search_attributes
from perdure.activities.telemetry import Telemetry
from perdure.agents import App, load_app
from perdure.contracts.errors import PerdureError, SetupError
from perdure.contracts.timing import set_timing
from perdure.logs import configure_logs
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
# A stopping worker waits no longer than this for a collector that does not answer.
FLUSH_S = 3.0
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
    throttle, grace, poller autoscaling) are set on the hosting worker. Metrics, traces and health
    are served as the settings say; raises SetupError if an extra for them is missing.
    """

    def __init__(
        self, app: App, *, store: Store | str | None = None, settings: Settings | None = None
    ) -> None:
        self._app = app
        self._settings = settings if settings is not None else Settings()
        self._store = store
        self._owned: Store | None = None
        self._engine: Engine | None = None
        self._wanted = check_extras(
            Wanted(
                metrics=self._settings.metrics_port > 0,
                traces={"on": True, "off": False}.get(self._settings.otel),
                content=self._settings.otel_content,
            )
        )
        self._exposition: Exposition | None = None
        self._worker: Worker | None = None
        self._stopping = False
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
        observers, self._exposition = make_observers(self._wanted, self._app.agents)
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
            telemetry=Telemetry(observers),
        )
        hosted = list(settled.get("activities") or [])
        settled["activities"] = [*hosted, *activities_of(self._engine)]
        settled.update(_timing_of(self._settings))
        return cast("WorkerConfig", settled)

    async def run_worker(self, worker: Worker, next: Callable[[Worker], Awaitable[None]]) -> None:
        """Run, with the app's dependencies open and health served."""
        self._worker = worker
        await super().run_worker(worker, next)

    def stop_soon(self) -> None:
        """Say so at `/readyz` from now on; the worker's owner then shuts it down."""
        self._stopping = True

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        engine = self._engine
        if engine is None:
            # A Replayer runs workflows only.
            yield
            return
        async with contextlib.AsyncExitStack() as ending:
            if self._owned is not None:
                ending.callback(self._owned.close)
            ending.callback(engine.close)
            health = self._serve_health(engine)
            ending.push_async_callback(asyncio.to_thread, health.close)
            ending.push_async_callback(engine.telemetry.close, FLUSH_S)
            engine.searchable = await knows_search_attributes(engine.client)
            await engine.load_models()
            engine.deps = await ending.enter_async_context(self._app.dependencies())
            yield

    def _serve_health(self, engine: Engine) -> Health:
        readiness = Readiness(engine.ledger, engine.client, self._polling)
        health = Health(asyncio.get_running_loop(), readiness.check, self._exposition)
        settings = self._settings
        for port in sorted({settings.metrics_port, settings.health_port} - {0}):
            health.serve(settings.health_host, port)
        return health

    def _polling(self) -> str | None:
        if self._stopping:
            return "stopping"
        return None if self._worker is not None and self._worker.is_running else "not polling"


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


def configure_logging(settings: Settings) -> None:
    """Log this process as the settings say, Temporal's records included."""
    configure_logs(settings.log_level, settings.log_format)
    # What Temporal appends to its messages are fields of their own in JSON.
    as_text = settings.log_format == "text"
    activity.logger.activity_info_on_message = as_text
    workflow.logger.workflow_info_on_message = as_text


def temporal_runtime(settings: Settings) -> Runtime | None:
    """Temporal's runtime with its metrics and its log, None where its default is as good.

    A metrics port that cannot be had is a line in the log, and the turns go on without.
    """
    log = LoggingConfig.default
    if settings.log_format == "json":
        core = LogForwardingConfig(
            logger=logging.getLogger("temporalio.core"), append_target_to_name=False
        )
        level = TelemetryFilter(core_level="WARN", other_level="ERROR")
        log = LoggingConfig(filter=level, forwarding=core)
    if settings.temporal_metrics_port:
        host = f"[{settings.health_host}]" if ":" in settings.health_host else settings.health_host
        address = f"{host}:{settings.temporal_metrics_port}"
        metrics = PrometheusConfig(
            address, counters_total_suffix=True, unit_suffix=True, durations_as_seconds=True
        )
        try:
            return Runtime(telemetry=TelemetryConfig(logging=log, metrics=metrics))
        except ValueError:
            # Its text says more than it should; the address is what can be wrong.
            logger.warning("%s cannot serve Temporal's metrics; turns go on without them", address)
    if settings.log_format == "json":
        return Runtime(telemetry=TelemetryConfig(logging=log))
    return None


async def run_worker(
    app: App,
    settings: Settings,
    *,
    client: Client | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[], Awaitable[Any] | None] | None = None,
) -> None:
    """Run a worker until `stop` is set, then let its activities end within the grace."""
    plugin = PerdurePlugin(app, settings=settings)
    client = client if client is not None else await connect(runtime=temporal_runtime(settings))
    worker = Worker(client, task_queue=settings.task_queue, plugins=[plugin])
    stop = stop if stop is not None else asyncio.Event()
    async with worker:
        logger.info("worker ready on task queue %s", settings.task_queue)
        if on_ready is not None:
            ready = on_ready()
            if ready is not None:
                await ready
        await stop.wait()
        plugin.stop_soon()
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
        configure_logging(settings)
        asyncio.run(_serve(parsed.app, settings))
    except PerdureError as error:
        print(f"perdure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
