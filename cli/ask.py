"""`perdure ask`: one turn, followed to its end in the terminal.

Following reads the ledger; where it cannot be read, the answer still comes from the workflow.
Giving up the wait (Ctrl-C) never touches the turn.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from perdure.cli.reading import missing_file, open_reader, shown_url
from perdure.cli.render import clean, make_console, print_result
from perdure.cli.render_follow import FollowPrinter
from perdure.client import TurnHandle, follow, start
from perdure.contracts.events import UserMessageRecorded
from perdure.contracts.turn import TurnRequest, TurnResult, TurnStatus, parse_turn_request
from perdure.settings import load_settings

if TYPE_CHECKING:
    from perdure.settings import Settings
    from perdure.stores.queries import Reader

# A turn that has ended shows the rest of its text at once, unless this is another ledger.
_LAST_TEXT_S: Final = 3.0
_NO_WORKER_S: Final = 5.0


@dataclass(frozen=True)
class Question:
    """What the command line asked; ids are made up where None."""

    agent: str
    message: str
    conversation: str | None
    request_id: str | None
    namespace: str

    def request(self) -> TurnRequest:
        """The turn's request. Raises InvalidRequest."""
        return parse_turn_request(
            {
                "agent": self.agent,
                "message": self.message,
                "conversation_id": self.conversation or f"ask-{secrets.token_hex(4)}",
                "request_id": self.request_id or f"ask-{secrets.token_hex(8)}",
                "namespace": self.namespace,
            }
        )


async def run_ask(
    question: Question, task_queue: str | None, store: str | None, *, as_json: bool
) -> int:
    """Ask and follow. Returns 0 for a completed turn, 1 for a failed or cancelled one."""
    from perdure.settings import connect

    request = question.request()
    settings = load_settings(store=store, task_queue=task_queue)
    # The ledger comes first: what is wrong with it is said before anything is started.
    with _reader(None if as_json else settings.store_url) as reader:
        handle = await start(await connect(), request, task_queue=settings.task_queue)
        try:
            if as_json:
                result = await handle.wait()
                print(result.model_dump_json())
            else:
                result = await _follow_and_wait(handle, reader, settings)
                print_result(make_console(), result, request)
        except asyncio.CancelledError:
            _note(f"the turn goes on: perdure turn show {handle.turn_id}")
            raise
    return 0 if result.status is TurnStatus.COMPLETED else 1


async def _follow_and_wait(
    handle: TurnHandle, reader: "Reader | None", settings: "Settings"
) -> TurnResult:
    waiting = asyncio.ensure_future(handle.wait())
    hinting = asyncio.ensure_future(_hint_at_missing_worker(handle, settings.task_queue))
    printer = FollowPrinter(make_console())
    following = asyncio.ensure_future(_print_all(printer, reader, handle))
    try:
        # What refuses a turn writes nothing that could be followed.
        await asyncio.wait((waiting, following), return_when=asyncio.FIRST_COMPLETED)
        result = await waiting
        await asyncio.wait((following,), timeout=_LAST_TEXT_S)
        printer.finish()
        _explain_silence(printer, following, result, settings)
        return result
    finally:
        for task in (waiting, hinting, following):
            task.cancel()
        await asyncio.wait((waiting, hinting, following))


@contextlib.contextmanager
def _reader(url: str | None) -> "Generator[Reader | None, None, None]":
    if url is not None and missing_file(url) is None:
        with open_reader(url) as reader:
            yield reader
    else:
        yield None


async def _print_all(printer: FollowPrinter, reader: "Reader | None", handle: TurnHandle) -> None:
    if reader is not None:
        async for item in follow(reader, handle.key):
            if isinstance(item, UserMessageRecorded) and (
                item.request_digest != handle.request_digest
            ):
                # Another request had this id before: its answer is not the one asked for.
                return
            printer.show(item)


def _explain_silence(
    printer: FollowPrinter,
    following: "asyncio.Future[None]",
    result: TurnResult,
    settings: "Settings",
) -> None:
    if following.done() and (error := following.exception()) is not None:
        _note(f"the turn could not be followed: {error}")
    elif not printer.ended:
        _note(
            f"the ledger {shown_url(settings.store_url)} does not have this turn; name the worker's"
            " own with --store or PERDURE_STORE_URL"
        )
    if not printer.ended and result.answer:
        print(clean(result.answer))


async def _hint_at_missing_worker(handle: TurnHandle, task_queue: str) -> None:
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    await asyncio.sleep(_NO_WORKER_S)
    queue = await handle.client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=handle.client.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
    )
    if not queue.pollers:
        _note(f"no worker polls the task queue {task_queue!r} yet; start one: perdure worker --app")


def _note(text: str) -> None:
    print(f"perdure: {text}", file=sys.stderr)
