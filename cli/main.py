"""`perdure ...`: declares the commands and turns our errors into one line and an exit code.

What a command does lies in a module of its own, imported when the command runs, so that `--help`
and completion load neither Temporal nor an SQL library. Exit codes: 0 done, 1 the turn or a promise
failed, 2 our errors and wrong usage.
"""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.dev_server import PORT_DEFAULT, UI_PORT_DEFAULT
from perdure.contracts.errors import InvalidRequest, PerdureError, ServerUnreachable
from perdure.contracts.ids import DEFAULT_NAMESPACE
from perdure.logs import LogFormat, configure_logs

cli = typer.Typer(
    name="perdure",
    help="Durable agent turns on Temporal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
turn_cli = typer.Typer(help="Look at single turns.", no_args_is_help=True)
cli.add_typer(turn_cli, name="turn")

AppPath = Annotated[str, typer.Argument(metavar="APP", help="The app, as package.module:attribute")]
TaskQueue = Annotated[
    str | None, typer.Option(help="Temporal task queue (else PERDURE_TASK_QUEUE, else perdure)")
]
StorePlace = Annotated[
    str | None, typer.Option("--store", help="The ledger: a URL, or the path of a SQLite file")
]
NamespaceOption = Annotated[str, typer.Option(help="The conversation's namespace")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]
LogFormatOption = Annotated[
    LogFormat, typer.Option(envvar="PERDURE_LOG_FORMAT", help="How log lines are written")
]


@cli.callback()
def log_as(log_format: LogFormatOption = "text") -> None:
    """Durable agent turns on Temporal."""
    # Workers that a command runs or starts read it from there.
    os.environ["PERDURE_LOG_FORMAT"] = log_format
    configure_logs("WARNING", log_format)


@cli.command()
def dev(
    app: AppPath,
    temporal_port: Annotated[int, typer.Option(help="Port of the Temporal server")] = PORT_DEFAULT,
    ui_port: Annotated[int, typer.Option(help="Port of the Temporal UI")] = UI_PORT_DEFAULT,
    db: Annotated[
        str | None, typer.Option(help="The ledger (else PERDURE_STORE_URL, else in perdure-data)")
    ] = None,
    temporal_db: Annotated[Path, typer.Option(help="The Temporal server's database")] = Path(
        "perdure-data/temporal.db"
    ),
    task_queue: TaskQueue = None,
) -> None:
    """Run the real Temporal server with its UI, the store and a worker, until Ctrl-C."""
    from perdure.cli.dev import DevOptions, run_dev

    options = DevOptions(app, temporal_port, ui_port, db, temporal_db, task_queue)
    _run(run_dev(options))


@cli.command()
def worker(
    app: Annotated[str, typer.Option("--app", help="The app, as package.module:attribute")],
    task_queue: TaskQueue = None,
) -> None:
    """Run a worker for an app, on the Temporal server and the store of the environment."""
    from perdure.worker import main as run_worker_program

    queue = [] if task_queue is None else ["--task-queue", task_queue]
    raise typer.Exit(run_worker_program(["--app", app, *queue]))


@cli.command()
def ask(
    agent: Annotated[str, typer.Argument(help="The agent's name")],
    message: Annotated[str, typer.Argument(help="What to say; `-` reads it from standard input")],
    conversation: Annotated[str | None, typer.Option(help="Go on with this conversation")] = None,
    request_id: Annotated[
        str | None, typer.Option(help="The same id again is the same turn")
    ] = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    task_queue: TaskQueue = None,
    store: StorePlace = None,
    as_json: AsJson = False,
) -> None:
    """Ask an agent and follow its turn to the end."""
    from perdure.cli.ask import Question, run_ask

    question = Question(
        agent=agent,
        message=sys.stdin.read() if message == "-" else message,
        conversation=conversation,
        request_id=request_id,
        namespace=namespace,
    )
    raise typer.Exit(_run(run_ask(question, task_queue, store, as_json=as_json)))


@cli.command()
def transcript(
    conversation: Annotated[str, typer.Argument(help="The conversation's id")],
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    after: Annotated[int, typer.Option(min=0, help="Only messages after this sequence")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=4096, help="At most that many")] = 4096,
    store: StorePlace = None,
    as_json: AsJson = False,
) -> None:
    """Print a conversation's transcript from the store."""
    from perdure.cli.show import show_transcript

    show_transcript(conversation, namespace, after, limit, store, as_json=as_json)


@turn_cli.command("show")
def turn_show(
    turn_id: Annotated[str, typer.Argument(metavar="ID", help="The turn's id: turn_...")],
    store: StorePlace = None,
    as_json: AsJson = False,
) -> None:
    """Show a turn: its steps, operations, attempts, recoveries and usage."""
    from perdure.cli.show import show_turn

    show_turn(turn_id, store, as_json=as_json)


@cli.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Where its databases go (else a new one in perdure-data)")
    ] = None,
    stay: Annotated[bool, typer.Option(help="Leave the UI up until Ctrl-C")] = False,
    real_model: Annotated[
        bool, typer.Option("--real-model", help="Ask a small real model on this machine")
    ] = False,
) -> None:
    """Kill workers in the middle of tools and check every promise, on a real Temporal server."""
    if real_model:
        from perdure.cli.demo_real import run_real_demo

        raise typer.Exit(_run(run_real_demo(folder, stay=stay)))
    from perdure.cli.demo import run_demo

    raise typer.Exit(_run(run_demo(folder, stay=stay)))


def main() -> None:
    """The `perdure` program."""
    try:
        cli()
    except InvalidRequest as error:
        _fail(f"{error}")
    except ServerUnreachable as error:
        print(f"perdure: {error} ({error.code})", file=sys.stderr)
        from perdure.cli.stopping import leave

        leave(2)
    except PerdureError as error:
        _fail(f"{error} ({error.code})")


def _run(work: Coroutine[Any, Any, int | None]) -> int:
    return asyncio.run(work) or 0


def _fail(message: str) -> None:
    print(f"perdure: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
