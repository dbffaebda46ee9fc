"""`perdure dev`: the real Temporal server with its UI, the store and a worker, in one command.

For development on one machine. It must not decide anything about turns.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client

from perdure.agents import App, load_app
from perdure.cli.dev_server import PORT_DEFAULT, DevServer, search_attribute_arguments
from perdure.cli.reading import shown_url
from perdure.cli.render import make_console
from perdure.cli.stopping import stop_on_signals
from perdure.contracts.errors import ServerUnreachable
from perdure.settings import Settings, load_settings
from perdure.worker import configure_logging, run_worker, temporal_runtime


@dataclass(frozen=True)
class DevOptions:
    """What the command line said; None where the environment decides."""

    app: str
    temporal_port: int
    ui_port: int
    db: str | None
    temporal_db: Path
    task_queue: str | None


async def run_dev(options: DevOptions) -> None:
    """Run until SIGTERM or SIGINT, or until the server or the worker ends. Stops its children."""
    app = load_app(options.app)
    settings = load_settings(store=options.db, task_queue=options.task_queue)
    configure_logging(settings)
    log = options.temporal_db.with_suffix(".log")
    server = DevServer(
        port=options.temporal_port,
        ui_port=options.ui_port,
        database=options.temporal_db,
        log=log,
        extra_arguments=search_attribute_arguments(),
    )
    with stop_on_signals() as stop:
        async with server:
            # Not by the environment: its profile may name a cloud and the credentials for it.
            client = await Client.connect(server.address, runtime=temporal_runtime(settings))
            working = asyncio.ensure_future(
                run_worker(
                    app,
                    settings,
                    client=client,
                    stop=stop,
                    on_ready=lambda: _print_addresses(server, settings, app, options),
                )
            )
            lost = asyncio.ensure_future(server.wait())
            await asyncio.wait((working, lost), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                # Without its server a worker takes long to stop, and there is nothing to save.
                raise ServerUnreachable(f"the Temporal server ended by itself; see {log}")
            lost.cancel()
            await working


def _print_addresses(server: DevServer, settings: Settings, app: App, options: DevOptions) -> None:
    console = make_console()
    console.print(f"Temporal UI   {server.ui_url}")
    console.print(f"Temporal      {server.address}, database {options.temporal_db}")
    console.print(f"Store         {shown_url(settings.store_url)}")
    console.print(f"Worker        task queue {settings.task_queue}, agents {', '.join(app.agents)}")
    agent = next(iter(app.agents), "AGENT")
    elsewhere = "" if server.port == PORT_DEFAULT else f"TEMPORAL_ADDRESS={server.address} "
    if options.db is not None:
        elsewhere += f"PERDURE_STORE_URL={shown_url(settings.store_url)} "
    if options.task_queue is not None:
        elsewhere += f"PERDURE_TASK_QUEUE={settings.task_queue} "
    console.print(f"Try           {elsewhere}perdure ask {agent} 'Hello'")
    console.print("Stop          Ctrl-C")
