"""`perdure demo`: kill workers in the middle of tools, on a real server, and check every promise.

It uses what a user has: the worker as a program, the client, the store's readers and a Temporal
client. Its exit code is 0 only if every promise held.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from temporalio.client import Client

from perdure.cli.demo_facts import gather_facts
from perdure.cli.demo_scenes import SCENES, Check, Scene, check_scene
from perdure.cli.demo_stage import AGENT, TASK_QUEUE, Stage
from perdure.cli.render_demo import print_scene, print_where_to_look
from perdure.cli.stopping import stop_on_signals
from perdure.client import start
from perdure.contracts.errors import SetupError
from perdure.contracts.turn import TurnRequest, parse_turn_request
from perdure.stores import open_store
from perdure.stores.queries import Reader

SCENE_TIMEOUT_S: Final = 60.0
_EXIT_STOPPED: Final = 130


@dataclass(frozen=True)
class _Tools:
    stage: Stage
    client: Client
    reader: Reader
    console: Console


async def run_demo(folder: Path | None, *, stay: bool) -> int:
    """Play every scene. Returns 0 if all promises held, 1 if not, 130 if it was stopped."""
    folder = folder or Path("perdure-data") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    stage = Stage(folder.resolve())
    if stage.ledger.exists():
        raise SetupError(f"{folder} holds a demo that was played; name another folder")
    console = Console(highlight=False, soft_wrap=True)
    with stop_on_signals() as stop:
        # What is opened is closed here, so that a signal cancels the play and not its cleaning up.
        async with AsyncExitStack() as exits:
            failed = await _unless_stopped(stop, _play(stage, console, exits))
            if failed is None:
                return _EXIT_STOPPED
            print_where_to_look(console, stage, staying=stay)
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


async def _play(stage: Stage, console: Console, exits: AsyncExitStack) -> int:
    began, failed = time.monotonic(), 0
    await exits.enter_async_context(stage.server)
    console.print(f"A real Temporal server is up; its UI is at {stage.server.ui_url}\n")
    store = await asyncio.to_thread(open_store, stage.store_url)
    exits.callback(store.close)
    client = await Client.connect(stage.server.address)
    tools = _Tools(stage, client, Reader(store), console)
    exits.push_async_callback(stage.stop_worker)
    stage.start_worker(hold=SCENES[0].point)
    for number, scene in enumerate(SCENES, 1):
        # The successor finishes this scene, and is set to be held in the next one.
        next_hold = SCENES[number].point if number < len(SCENES) else ""
        try:
            async with asyncio.timeout(SCENE_TIMEOUT_S):
                checks = await _play_scene(number, scene, next_hold, tools)
        except TimeoutError:
            console.print(f"[bold red]{scene.title}: no end within {SCENE_TIMEOUT_S:.0f} s[/]")
            console.print(f"Its turn is {scene.turn_id}; the logs are in {stage.folder}\n")
            return failed + 1
        failed += sum(not check.held for check in checks)
    verdict = "Every promise held" if not failed else f"{failed} promises did NOT hold"
    console.print(f"[bold]{verdict}[/bold] ({time.monotonic() - began:.0f} s).\n")
    return failed


async def _play_scene(
    number: int, scene: Scene, next_hold: str, tools: _Tools
) -> tuple[Check, ...]:
    stage = tools.stage
    handle = await start(tools.client, _request(scene), task_queue=TASK_QUEUE)
    killed_pid = await stage.kill_worker_at(scene.point)
    stage.start_worker(hold=next_hold)
    result = await stage.unless_worker_ends(handle.wait())
    facts = await gather_facts(scene, result, tools.reader, stage.desk, tools.client)
    checks = check_scene(scene, facts, killed_pid)
    print_scene(tools.console, f"{number}/{len(SCENES)}", scene, facts, checks)
    return checks


def _request(scene: Scene) -> TurnRequest:
    return parse_turn_request(
        {
            "agent": AGENT,
            "conversation_id": scene.conversation_id,
            "request_id": scene.request_id,
            "message": scene.message,
        }
    )
