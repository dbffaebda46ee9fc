"""The app of the fault tests: one tool of each replay safety, each effect a line in a file.

The folder is `PERDURE_FAULT_DIR`. An effect is counted when it starts. A tool whose name stands in
`PERDURE_FAULT_HOLD` announces itself (`holding.<tool>`) after its effect has started, in its first
generation, and waits until the file `release` is there. With `PERDURE_FAULT_STANDBY` a worker is
up, but takes no work before it is told to (`WorkerProcess.go`).
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from perdure import NOT_EXECUTED, Agent, App, ReplaySafety, ToolContext, tool
from perdure.activities.providers.scripted import ScriptedModel
from perdure.agents import BlockingToolContext

FOLDER = Path(os.environ.get("PERDURE_FAULT_DIR", "."))
POLL_S = 0.02


def note_effect(name: str, operation_id: str, generation: int) -> None:
    """Count an effect, durably and atomically."""
    line = json.dumps({"tool": name, "op": operation_id, "gen": generation, "pid": os.getpid()})
    descriptor = os.open(FOLDER / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode() + b"\n")
    os.fsync(descriptor)
    os.close(descriptor)


def holds(name: str, generation: int) -> bool:
    """Whether this execution is to hold."""
    return generation == 1 and name in os.environ.get("PERDURE_FAULT_HOLD", "").split(",")


async def hold(name: str, generation: int) -> None:
    """Announce and wait, without blocking the loop."""
    if holds(name, generation):
        (FOLDER / f"holding.{name}").write_text(str(os.getpid()))
        while not (FOLDER / "release").exists():
            await asyncio.sleep(POLL_S)


@tool(replay=ReplaySafety.SAFE)
async def look(ctx: ToolContext) -> str:
    """A read."""
    note_effect("look", ctx.operation_id, ctx.generation)
    await ctx.output("looked")
    await hold("look", ctx.generation)
    return "seen"


@tool(replay=ReplaySafety.KEYED)
def pay(ctx: BlockingToolContext) -> str:
    """A payment whose callee deduplicates; a plain function."""
    note_effect("pay", ctx.operation_id, ctx.generation)
    ctx.output("paid")
    if holds("pay", ctx.generation):
        (FOLDER / "holding.pay").write_text(str(os.getpid()))
        while not (FOLDER / "release").exists() and not ctx.cancelled:
            time.sleep(POLL_S)
    return "paid"


def claim(operation_id: str, generation: int, claimant: str) -> bool:
    """The callee of `ship`: a generation is shipped or fenced, for ever, by who comes first."""
    path = FOLDER / f"claim.{operation_id}.{generation}"
    try:
        path.symlink_to(claimant)
    except FileExistsError:
        return os.readlink(path) == claimant
    return True


@tool(replay=ReplaySafety.RECONCILED)
async def ship(ctx: ToolContext) -> str:
    """A shipment that can be looked up afterwards; the callee fences lost generations."""
    if not claim(ctx.operation_id, ctx.generation, "shipped"):
        raise RuntimeError("this generation is fenced")
    note_effect("ship", ctx.operation_id, ctx.generation)
    await hold("ship", ctx.generation)
    return "shipped"


@ship.reconcile
async def ship_reconcile(ctx: ToolContext) -> object:
    """Whether this generation was shipped; if not, it never will be."""
    fenced = claim(ctx.operation_id, ctx.generation, "fenced")
    return NOT_EXECUTED if fenced else "shipped"


@tool
async def send(ctx: ToolContext) -> str:
    """A message that cannot be taken back."""
    note_effect("send", ctx.operation_id, ctx.generation)
    await ctx.output("half sent")
    await hold("send", ctx.generation)
    return "sent"


TOOLS = ("look", "pay", "ship", "send")

# "use look" calls the tool once; "say" answers at once; "stream" streams and can be held.
RULES = [
    *(
        {
            "when": f"^use {name}$",
            "steps": [{"calls": [{"tool": name}]}, {"text": "done: {results}"}],
        }
        for name in TOOLS
    ),
    {
        "when": "^use all$",
        "steps": [{"calls": [{"tool": name} for name in TOOLS]}, {"text": "done: {results}"}],
    },
    {"when": "^stream$", "steps": [{"text": ["one ", "two ", "three"]}]},
    # The first attempt is held in the middle of its stream; a later one streams the same at once.
    {
        "when": "^stream held$",
        "steps": [
            {
                "attempts": [
                    {
                        "text": ["one ", "two ", "three"],
                        "hold_file": str(FOLDER / "release"),
                        "hold_after_chunks": 1,
                    },
                    {"text": ["one ", "two ", "three"]},
                ]
            }
        ],
    },
    {"steps": [{"text": "hello"}]},
]

agent = Agent(
    "fault",
    ScriptedModel(RULES, record=FOLDER / "model_calls"),
    "Be careful.",
    [look, pay, ship, send],
)


@asynccontextmanager
async def standby(_app: App) -> AsyncGenerator[None]:
    """Entered before the worker takes work: waits there if this process is a standby."""
    if os.environ.get("PERDURE_FAULT_STANDBY"):
        # Another process makes the file, so there is no event to wait for.
        while not (FOLDER / f"standby.{os.getpid()}.go").exists():
            await asyncio.sleep(POLL_S)
    yield


app = App([agent], lifespan=standby)
