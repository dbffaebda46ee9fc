"""What a tool is given about its call, beside its arguments.

Two classes with the same attributes: coroutine tools await `output`, plain tools block in it. They
carry facts and pass output on; they decide nothing and must not know where output goes.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from perdure.contracts.errors import SinkClosed
from perdure.contracts.ids import DEFAULT_NAMESPACE

Send = TypeVar("Send")
AsyncSend = Callable[[str], Coroutine[Any, Any, None]]
BlockingSend = Callable[[str], None]

# A thread that waits for a loop looks this often whether the loop is still there.
_LOOP_CHECK_S: Final = 0.5


class _CallContext(Generic[Send]):
    # No dataclass: a generated repr would show arguments and secrets in logs.
    def __init__(
        self,
        *,
        operation_id: str,
        generation: int = 1,
        arguments: dict[str, Any] | None = None,
        deps: Any = None,
        namespace: str = DEFAULT_NAMESPACE,
        conversation_id: str = "",
        turn_id: str = "",
        output: Send | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self.operation_id = operation_id
        self.generation = generation
        self.arguments: dict[str, Any] = {} if arguments is None else arguments
        self.deps = deps
        self.namespace = namespace
        self.conversation_id = conversation_id
        self.turn_id = turn_id
        self._send = output
        self._cancelled = threading.Event() if cancelled is None else cancelled

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled. A plain tool is never killed: it should look here."""
        return self._cancelled.is_set()

    def mark_cancelled(self) -> None:
        """Set `cancelled`; for whoever runs the tool, never for the tool."""
        self._cancelled.set()


class ToolContext(_CallContext[AsyncSend]):
    """The context of a coroutine tool.

    `operation_id` is the call's idempotency key, the same in every execution; `generation` counts
    the executions that were allowed; `arguments` are the final arguments as JSON data; `deps` is
    what the app's lifespan yielded. Without `output` (in a test of a tool) output goes nowhere.
    """

    async def output(self, text: str) -> None:
        """Report progress. Returns when the text is durable."""
        if self._send is not None:
            await self._send(text)

    def blocking(self, loop: asyncio.AbstractEventLoop) -> "BlockingToolContext":
        """The same call for a plain tool in a thread; its output runs on `loop`."""
        send = self._send
        return BlockingToolContext(
            operation_id=self.operation_id,
            generation=self.generation,
            arguments=self.arguments,
            deps=self.deps,
            namespace=self.namespace,
            conversation_id=self.conversation_id,
            turn_id=self.turn_id,
            output=None if send is None else lambda text: _send_and_wait(send, text, loop),
            cancelled=self._cancelled,
        )


class BlockingToolContext(_CallContext[BlockingSend]):
    """The context of a plain tool, with the attributes of `ToolContext`."""

    def output(self, text: str) -> None:
        """Report progress. Blocks until the text is durable."""
        if self._send is not None:
            self._send(text)


def _send_and_wait(send: AsyncSend, text: str, loop: asyncio.AbstractEventLoop) -> None:
    sending = send(text)
    try:
        future = asyncio.run_coroutine_threadsafe(sending, loop)
    except RuntimeError:
        sending.close()
        raise SinkClosed("the worker has stopped; this output is not recorded") from None
    # A loop that was closed with the request still queued never answers it.
    while not future.done():
        concurrent.futures.wait((future,), timeout=_LOOP_CHECK_S)
        if loop.is_closed() and not future.done():
            raise SinkClosed("the worker stopped before this output was recorded")
    try:
        future.result()
    except concurrent.futures.CancelledError:
        raise SinkClosed("the recording of this output was cancelled") from None
