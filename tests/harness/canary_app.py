"""An app whose every part leaks, if anything can: each text has a canary of its own."""

import asyncio
import os
from pathlib import Path

from perdure import Agent, App, ReplaySafety, ToolContext, errors, tool
from perdure.contracts.messages import TextPart, ToolCallPart
from perdure.contracts.model import FinishReason, ModelRequest, ModelResponse, ModelSink

MESSAGE, ARGUMENT, RESULT, ANSWER = (
    "canary-message",
    "canary-argument",
    "canary-result",
    "canary-answer",
)
PROVIDER, RAISED, OUTPUT, STREAMED = (
    "canary-provider",
    "canary-raised",
    "canary-output",
    "canary-streamed",
)
INSTRUCTIONS, DESCRIPTION = "canary-instructions", "canary-description"
CANARIES = (
    ARGUMENT,
    RESULT,
    ANSWER,
    PROVIDER,
    RAISED,
    OUTPUT,
    STREAMED,
    INSTRUCTIONS,
    DESCRIPTION,
)

FOLDER = Path(os.environ.get("PERDURE_FAULT_DIR", "."))


@tool(replay=ReplaySafety.SAFE, description=DESCRIPTION)
async def find(what: str, ctx: ToolContext) -> str:
    """Report progress and give a result."""
    await ctx.output(OUTPUT)
    return f"{RESULT} {what}"


@tool
def fail(what: str) -> str:
    """Raise in a thread, from another exception."""
    try:
        raise KeyError(RAISED)
    except KeyError as error:
        raise ValueError(f"{RAISED} {what}") from error


@tool(replay=ReplaySafety.SAFE)
async def retry(what: str) -> str:
    """Report errors until the tries are used up."""
    raise errors.ToolError(RAISED, retry_after_s=0.01)


@tool(replay=ReplaySafety.RECONCILED)
async def ship(what: str) -> str:
    """Break, so that it is asked about."""
    raise RuntimeError(RAISED)


@ship.reconcile
async def shipped(what: str, ctx: ToolContext) -> object:
    """Break once, and then know the result."""
    if not (FOLDER / "asked").exists():
        (FOLDER / "asked").touch()
        raise RuntimeError(RAISED)
    return RESULT


@tool(replay=ReplaySafety.SAFE, timeout_s=0.2)
async def slow(what: str, ctx: ToolContext) -> str:
    """Hang once, and raise when it is cancelled."""
    if ctx.generation > 1:
        return RESULT
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise RuntimeError(RAISED) from None
    return RESULT


class Leaking:
    """Complain, break, call every tool in every way, then answer; `hang` hangs and `die` dies."""

    name = "leaking"

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Answer by step and attempt."""
        said = request.messages[0].text
        await sink.text(STREAMED)
        if "hang" in said:
            (FOLDER / "hanging").touch()
            await asyncio.Event().wait()
        if "die" in said:
            raise errors.ModelRefused(PROVIDER)
        if request.step == 1 and request.attempt == 1:
            raise errors.ModelUnavailable(PROVIDER, retry_after_s=0.01)
        if request.step == 1 and request.attempt == 2:
            raise RuntimeError(PROVIDER)
        if request.step > 1:
            return ModelResponse(parts=(TextPart(text=ANSWER),))
        names = ("find", "fail", "retry", "ship", "slow")
        parts = [ToolCallPart(name=name, arguments={"what": ARGUMENT}) for name in names]
        parts += [
            ToolCallPart(name="find", arguments={"what": 1, ARGUMENT: ARGUMENT}),
            ToolCallPart(name="find", arguments_text=f"{{{ARGUMENT}"),
            ToolCallPart(name=ARGUMENT, arguments={}),
        ]
        return ModelResponse(parts=tuple(parts), finish_reason=FinishReason.TOOL_CALLS)


app = App([Agent("desk", Leaking(), INSTRUCTIONS, [find, fail, retry, ship, slow])])
