"""`perdure demo`: kill workers in the middle of tools, on a real server, and check every promise.

It uses what a user has: the worker as a program, the client, the store's readers and a Temporal
client. Its exit code is 0 only if every promise held.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console
from temporalio.client import Client

from perdure.cli.demo_facts import gather_facts
from perdure.cli.demo_scenes import SCENES, Check, Scene, check_scene
from perdure.cli.demo_stage import AGENT, APP, TASK_QUEUE, Stage
from perdure.cli.render_demo import print_scene, print_where_to_look
from perdure.cli.stopping import stop_on_signals
from perdure.client import TurnHandle, start
from perdure.contracts.errors import SetupError
from perdure.contracts.turn import TurnRequest, parse_turn_request
from perdure.contracts.views import TurnDetails
from perdure.stores import open_store
from perdure.stores.queries import Reader

SCENE_TIMEOUT_S: Final = 60.0
_EXIT_STOPPED: Final = 130
_NOBODY: Final = 0


class Beside(Protocol):
    """What runs beside the workers and outlives them: entered before the first one starts."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exit_of: object) -> None: ...

    def environment(self) -> Mapping[str, str]:
        """What workers need to find it."""
        ...

    def announcement(self) -> str:
        """What it is, for the reader of the demo."""
        ...

    def checks(self, details: TurnDetails) -> tuple[Check, ...]:
        """Its own view of a turn, against the ledger's. Asked once after each scene."""
        ...


@dataclass(frozen=True)
class Show:
    """Which app's agent plays which scenes, and what is needed beside its workers."""

    app: str
    agent: str
    scenes: tuple[Scene, ...]
    scene_timeout_s: float = SCENE_TIMEOUT_S
    beside: Callable[[Path], Beside] | None = None


ORDER_DESK: Final = Show(APP, AGENT, SCENES)


@dataclass(frozen=True)
class _Tools:
    show: Show
    stage: Stage
    client: Client
    reader: Reader
    console: Console
    beside: Beside | None


async def run_demo(folder: Path | None, *, stay: bool, show: Show = ORDER_DESK) -> int:
    """Play every scene. Returns 0 if all promises held, 1 if not, 130 if it was stopped."""
    folder = folder or Path("perdure-data") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    stage = Stage(folder.resolve(), show.app)
    if stage.ledger.exists():
        raise SetupError(f"{folder} holds a demo that was played; name another folder")
    console = Console(highlight=False, soft_wrap=True)
    with stop_on_signals() as stop:
        # What is opened is closed here, so that a signal cancels the play and not its cleaning up.
        async with AsyncExitStack() as exits:
            failed = await _unless_stopped(stop, _play(show, stage, console, exits))
            if failed is None:
                return _EXIT_STOPPED
            print_where_to_look(console, stage, show.scenes[-1], staying=stay)
            if stay:
                await stop.wait()
    return 1 if failed else 0


async def _unless_stopped(stop: asyncio.Event, playing: Coroutine[Any, Any, int]) -> int | None:
    played = asyncio.ensure_future(playing)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((played, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    played.cancel()
    try:
        return await played
    except asyncio.CancelledError:
        return None


async def _play(show: Show, stage: Stage, console: Console, exits: AsyncExitStack) -> int:
    began, failed = time.monotonic(), 0
    tools = await _set_up(show, stage, console, exits)
    stage.start_worker(hold=show.scenes[0].point)
    for number, scene in enumerate(show.scenes, 1):
        try:
            async with asyncio.timeout(show.scene_timeout_s):
                checks = await _play_scene(number, scene, tools)
        except TimeoutError:
            console.print(f"[bold red]{scene.title}: no end within {show.scene_timeout_s:.0f} s[/]")
            console.print(f"Its turn is {scene.turn_id}; the logs are in {stage.folder}\n")
            return failed + 1
        failed += sum(not check.held for check in checks)
    verdict = "Every promise held" if not failed else f"{failed} promises did NOT hold"
    console.print(f"[bold]{verdict}[/bold] ({time.monotonic() - began:.0f} s).\n")
    return failed


async def _set_up(show: Show, stage: Stage, console: Console, exits: AsyncExitStack) -> _Tools:
    beside = None if show.beside is None else show.beside(stage.folder)
    if beside is not None:
        await exits.enter_async_context(beside)
        stage.environment.update(beside.environment())
        console.print(beside.announcement())
    await exits.enter_async_context(stage.server)
    console.print(f"A real Temporal server is up; its UI is at {stage.server.ui_url}\n")
    store = await asyncio.to_thread(open_store, stage.store_url)
    exits.callback(store.close)
    client = await Client.connect(stage.server.address)
    exits.push_async_callback(stage.stop_worker)
    return _Tools(show, stage, client, Reader(store), console, beside)


async def _play_scene(number: int, scene: Scene, tools: _Tools) -> tuple[Check, ...]:
    stage, scenes = tools.stage, tools.show.scenes
    handle = await start(tools.client, _request(tools.show, scene), task_queue=TASK_QUEUE)
    killed_pid = await _kill_unless_over(stage, scene, handle)
    # The successor finishes this scene, and is set to be held in the next one.
    stage.start_worker(hold=scenes[number].point if number < len(scenes) else "")
    result = await stage.unless_worker_ends(handle.wait())
    facts = await gather_facts(scene, result, tools.reader, stage.desk, tools.client)
    checks = check_scene(scene, facts, killed_pid)
    if tools.beside is not None:
        details = tools.reader.details(scene.turn_id)
        assert details is not None, "a turn that ended stands in the ledger"
        checks += tools.beside.checks(details)
    print_scene(tools.console, f"{number}/{len(scenes)}", scene, facts, checks)
    return checks


async def _kill_unless_over(stage: Stage, scene: Scene, handle: TurnHandle) -> int:
    # A turn that never comes to the point breaks the scene's first promise: it kills nobody.
    killing = asyncio.ensure_future(stage.kill_worker_at(scene.point))
    ending = asyncio.ensure_future(handle.wait())
    try:
        await asyncio.wait((killing, ending), return_when=asyncio.FIRST_COMPLETED)
        if killing.done():
            return killing.result()
    finally:
        killing.cancel()
        ending.cancel()
    await stage.stop_worker()
    return _NOBODY


def _request(show: Show, scene: Scene) -> TurnRequest:
    return parse_turn_request(
        {
            "agent": show.agent,
            "conversation_id": scene.conversation_id,
            "request_id": scene.request_id,
            "message": scene.message,
        }
    )
