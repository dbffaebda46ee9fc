"""The other side: the barest workflow that does the same, without a store.

Model, tool, model as activities; the messages travel through the history, as they must where there
is no store. It keeps none of our promises and is here only to be measured against.
"""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import workflow

_START_TO_CLOSE = timedelta(seconds=300)
_HEARTBEAT = timedelta(seconds=10)


@workflow.defn(name="BareTurn")
class BareTurn:
    """Input: `{"messages": [...]}`. Result: `{"answer": ...}`."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the model until it calls no tool."""
        messages: list[Any] = request["messages"]
        step = 0
        while True:
            step += 1
            answer = await _activity("bare_model", {"messages": messages, "step": step})
            calls = [part for part in answer["parts"] if part["type"] == "tool_call"]
            if not calls:
                return {"answer": "".join(part["text"] for part in answer["parts"])}
            results = await asyncio.gather(*(_activity("bare_tool", call) for call in calls))
            parts = [{"type": "tool_result", **result} for result in results]
            messages = [
                *messages,
                {"role": "assistant", "parts": answer["parts"]},
                {"role": "tool", "parts": parts},
            ]


async def _activity(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return await workflow.execute_activity(
        name,
        value,
        result_type=dict[str, Any],
        summary=name,
        start_to_close_timeout=_START_TO_CLOSE,
        heartbeat_timeout=_HEARTBEAT,
    )
