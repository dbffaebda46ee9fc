"""The sides of the benchmark: a worker process each, and one turn on it.

Both are started and awaited through the same Temporal client calls, so that the ratio of their
times is that of the turns.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from temporalio.client import Client, WorkflowHandle
from work import plan

from perdure.contracts.messages import Message, assistant_message, user_message
from perdure.stores import Store
from perdure.stores.transcript import ConversationAppend, append_messages, ensure_conversation

PRIOR_CHARS: Final = 500
_NAMESPACE: Final = "default"
_HERE: Final = Path(__file__).parent
_START_S: Final = 60.0
# No two turns of a run share an id.
_NUMBERS: Final = count(1)


class WorkerProcess:
    """One worker in a process of its own; `read` is what it has used so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def read(self) -> dict[str, Any]:
        """CPU seconds and counts since the process started."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"read\n")
        return json.loads(await self._line())

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _START_S)
        if not line:
            raise RuntimeError("a worker of the benchmark ended; see what it printed above")
        return line


@asynccontextmanager
async def worker_process(queue: str, address: str, store_url: str) -> AsyncGenerator[WorkerProcess]:
    """A running worker on the task queue; it ends with the block."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TEMPORAL_", "PERDURE_"))
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_HERE / "worker_process.py"), queue),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=kept
        | {
            "TEMPORAL_ADDRESS": address,
            "TEMPORAL_CONFIG_FILE": os.devnull,
            "PERDURE_STORE_URL": store_url,
        },
    )
    try:
        worker = WorkerProcess(process)
        assert await worker._line() == b"ready\n"
        yield worker
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@dataclass(frozen=True)
class Side:
    """Where and how a turn is run: `bare`, or `perdure` with its ledger for prior messages."""

    name: str
    client: Client
    queue: str
    worker: WorkerProcess
    store: Store | None = None
    message: str = plan()

    async def prepare(self, prior: int) -> dict[str, Any]:
        """The input of a turn with that many messages before it."""
        number = next(_NUMBERS)
        if self.store is None:
            messages = [*prior_messages(prior), user_message(self.message)]
            return {"messages": [message.model_dump(mode="json") for message in messages]}
        conversation = f"bench-{number}"
        if prior:
            append = ConversationAppend(
                namespace=_NAMESPACE,
                conversation_id=conversation,
                expected_version=0,
                messages=tuple(prior_messages(prior)),
            )
            self.store.transact(ensure_conversation, _NAMESPACE, conversation)
            self.store.transact(append_messages, append)
        return {
            "agent": "bench",
            "conversation_id": conversation,
            "request_id": f"request-{number}",
            "message": self.message,
        }

    async def start(self, value: dict[str, Any]) -> WorkflowHandle[Any, dict[str, Any]]:
        """Start a turn with a prepared input."""
        number = next(_NUMBERS)
        return await self.client.start_workflow(
            "BareTurn" if self.store is None else "AgentTurn",
            value,
            id=f"bench/{self.name}/{number}",
            task_queue=self.queue,
            result_type=dict[str, Any],
        )

    async def run(self, value: dict[str, Any]) -> str:
        """Run a turn to its end; returns its answer."""
        handle = await self.start(value)
        answer = (await handle.result())["answer"]
        assert isinstance(answer, str)
        return answer


def prior_messages(number: int) -> list[Message]:
    """A conversation so far: user and assistant take turns."""
    text = ("All that was said before. " * PRIOR_CHARS)[:PRIOR_CHARS]
    speakers = (user_message, assistant_message)
    return [speakers[index % 2](text) for index in range(number)]
