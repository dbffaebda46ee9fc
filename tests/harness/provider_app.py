"""The app of workers whose model is asked over HTTP: an endpoint that speaks OpenAI's protocol.

The server's address is `PERDURE_MODEL_URL`.
"""

import os

from perdure import Agent, App, Endpoint, ReplaySafety, tool


@tool(replay=ReplaySafety.SAFE)
async def look() -> str:
    """A read."""
    return "seen"


app = App(
    [Agent("desk", "mock:gpt-4o-mini", "Be brief.", [look])],
    endpoints={
        "mock": Endpoint("openai", base_url=os.environ.get("PERDURE_MODEL_URL", "http://unset"))
    },
)
