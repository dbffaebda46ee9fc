"""A worker process of the benchmark: it hosts both sides and says on request what it has used.

`python worker_process.py QUEUE` prints `ready`; then each line `read` on its standard input is
answered with one line of JSON, and the end of the input ends it. Both sides run on the very
settings of `PerdurePlugin`, because it is the plugin that sets them for the whole worker.
"""

import asyncio
import json
import logging
import os
import sys
from typing import Any, TextIO

from bare import BareTurn
from spent import Spent
from temporalio import activity
from temporalio.worker import Worker
from work import WorkModel, app, work

from perdure.contracts.messages import Message
from perdure.contracts.model import ModelRequest
from perdure.settings import Settings, connect
from perdure.stores import open_store
from perdure.worker import PerdurePlugin


class NoSink:
    """Takes a stream and keeps nothing."""

    async def text(self, delta: str) -> None:
        """Take a piece of the answer."""

    async def thinking(self, delta: str) -> None:
        """Take a piece of the reasoning."""


_MODEL = WorkModel()


@activity.defn
async def bare_model(value: dict[str, Any]) -> dict[str, Any]:
    """The model without a store: messages in, parts out."""
    messages = tuple(Message.model_validate(message) for message in value["messages"])
    request = ModelRequest(agent="bench", model="work", messages=messages, step=value["step"])
    response = await _MODEL.respond(request, NoSink())
    return response.model_dump(mode="json", include={"parts", "usage"})


@activity.defn
async def bare_tool(call: dict[str, Any]) -> dict[str, Any]:
    """The tool without the gate."""
    text = await work(**call["arguments"])
    return {"call_id": call["call_id"], "name": call["name"], "text": text}


async def serve(queue: str, answers: TextIO) -> None:
    """Run the worker until the input ends."""
    settings = Settings(task_queue=queue)
    store = open_store(settings.store_url)
    spent = Spent(store)
    worker = Worker(
        await connect(),
        task_queue=queue,
        workflows=[BareTurn],
        activities=[bare_model, bare_tool],
        plugins=[PerdurePlugin(app, store=store, settings=settings)],
    )
    async with worker:
        print("ready", file=answers, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(spent.read()), file=answers, flush=True)
    store.close()


def only_answers() -> TextIO:
    """The standard output, from now on for answers alone: the SDK's core logs into it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    asyncio.run(serve(sys.argv[1], only_answers()))
