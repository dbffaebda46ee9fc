"""The work that both sides of the benchmark do: one model and one tool, told what by the message.

A message such as `steps=1 calls=1 size=20 chunks=0` asks for that many model steps with that many
calls each, of that many bytes of argument and of result, and for an answer streamed in that many
pieces. Nothing here waits: what is measured is the machinery around it.
"""

import re
from typing import Any, Final

from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.contracts.messages import Message, Role, TextPart, ToolCallPart
from perdure.contracts.model import FinishReason, ModelRequest, ModelResponse, ModelSink, Usage

_PLAN: Final = re.compile(r"^steps=(\d+) calls=(\d+) size=(\d+) chunks=(\d+)$")
ANSWER: Final = "The work is done, and this is what there is to say about it. "


def plan(*, steps: int = 1, calls: int = 1, size: int = 20, chunks: int = 0) -> str:
    """The message that asks for it."""
    return f"steps={steps} calls={calls} size={size} chunks={chunks}"


class WorkModel:
    """Answers as the last user message says; the same for both sides."""

    name = "work"

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Call the tool, or answer."""
        steps, calls, size, chunks = _read_plan(request.messages)
        usage = Usage(input_tokens=10, output_tokens=10)
        if request.step <= steps:
            arguments: dict[str, Any] = {"text": "x" * size}
            part = ToolCallPart(name="work", arguments=arguments)
            return ModelResponse(
                parts=(part,) * calls, finish_reason=FinishReason.TOOL_CALLS, usage=usage
            )
        for _ in range(chunks):
            await sink.text(ANSWER)
        text = ANSWER * max(chunks, 1)
        return ModelResponse(parts=(TextPart(text=text),), usage=usage)


async def work(text: str) -> str:
    """Work on a text.

    Args:
        text: Anything.
    """
    return text.upper()


@tool(replay=ReplaySafety.UNSAFE, name="work")
async def gated_work(text: str, ctx: ToolContext) -> str:
    """Work on a text.

    Args:
        text: Anything.
    """
    return await work(text)


agent = Agent("bench", WorkModel(), "Work, then answer.", [gated_work])
app = App([agent])


def _read_plan(messages: tuple[Message, ...]) -> tuple[int, int, int, int]:
    for message in reversed(messages):
        if message.role is Role.USER:
            found = _PLAN.match(message.text)
            assert found is not None, "the last user message is no plan"
            steps, calls, size, chunks = (int(number) for number in found.groups())
            return steps, calls, size, chunks
    raise AssertionError("there is no user message")
