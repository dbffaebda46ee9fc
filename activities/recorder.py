"""The recorder: one ordered stream that is durable before anyone sees it (DESIGN 7, promise P8).

Bounded by commands and by bytes; it refuses or makes the caller wait, and never drops what it
accepted. Text is flushed on the first chunk, then every 80 ms or 8 KiB. A failure of the store ends
it loudly. It must not know what the stream means.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from perdure.contracts.errors import ModelProtocolError, RecorderFull, RecorderStopped, SinkClosed
from perdure.contracts.limits import (
    ANSWER_PARTS_BYTES_MAX,
    PARTIAL_FLUSH_BYTES,
    PARTIAL_FLUSH_S,
    RECORDER_BYTES_MAX,
    RECORDER_COMMANDS_MAX,
)
from perdure.stores.partials import TEXT, THINKING

Piece = tuple[str, str]
# Makes pieces durable, starting at that position; returns the next position.
Persist = Callable[[int, list[Piece]], Awaitable[int]]
# Shows pieces that are durable.
Deliver = Callable[[list[Piece]], Awaitable[None]]

_FIRST_POSITION: Final = 1
# A model may hand over any length at once; the budgets are met piece by piece.
_PIECE_CHARS_MAX: Final = 64 * 1024


class Recorder:
    """Takes pieces of one stream, makes them durable in order, then delivers them."""

    def __init__(self, persist: Persist, deliver: Deliver | None = None) -> None:
        self._persist = persist
        self._deliver = deliver
        self._queue: list[Piece] = []
        self._queued_bytes = 0
        self._accepted = 0
        self._written = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._flush_now = False
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._write(), name="perdure-recorder")

    def try_record(self, channel: str, text: str) -> None:
        """Accept a piece without waiting.

        Raises RecorderFull where a budget is used up, RecorderStopped after a failure.
        """
        self._check_open()
        if not self._fits(text):
            raise RecorderFull("the recorder's queue is full; wait for it to be written")
        self._accept(channel, text)

    async def record(self, channel: str, text: str) -> None:
        """Accept a piece, waiting for room. Raises RecorderFull if it can never fit."""
        if len(text.encode("utf-8", "surrogatepass")) > RECORDER_BYTES_MAX:
            raise RecorderFull(f"one piece of output is over {RECORDER_BYTES_MAX} bytes")
        async with self._changed:
            self._check_open()
            await self._changed.wait_for(lambda: self._ended or self._fits(text))
            self._check_open()
            self._accept(channel, text)
            self._changed.notify_all()

    async def flush(self) -> None:
        """Return when everything accepted before is durable and delivered.

        Raises RecorderStopped if it could not be made durable.
        """
        async with self._changed:
            target = self._accepted
            self._flush_now = True
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: self._failure is not None or self._written >= target
            )
        self._raise_failure()

    async def close(self) -> None:
        """Flush, then end. Raises RecorderStopped if something accepted could not be written."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        await asyncio.wait({self._task})
        self._raise_failure()

    def abandon(self) -> None:
        """Stop without writing what is still queued: the store does not answer."""
        self._closed = True
        self._task.cancel()

    @property
    def failure(self) -> BaseException | None:
        """What ended the recorder, if something did."""
        return self._failure

    @property
    def _ended(self) -> bool:
        return self._closed or self._failure is not None

    def _check_open(self) -> None:
        self._raise_failure()
        if self._closed:
            raise SinkClosed("the response has ended; nothing more can be streamed into it")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RecorderStopped("the recorder stopped: the store failed") from self._failure

    def _fits(self, text: str) -> bool:
        size = len(text.encode("utf-8", "surrogatepass"))
        return (
            len(self._queue) < RECORDER_COMMANDS_MAX
            and self._queued_bytes + size <= RECORDER_BYTES_MAX
        )

    def _accept(self, channel: str, text: str) -> None:
        self._queue.append((channel, text))
        self._queued_bytes += len(text.encode("utf-8", "surrogatepass"))
        self._accepted += 1
        if self._accepted == 1:
            self._flush_now = True

    async def _write(self) -> None:
        position = _FIRST_POSITION
        try:
            while True:
                batch = await self._next_batch()
                if not batch:
                    return
                position = await self._persist(position, batch)
                if self._deliver is not None:
                    await self._deliver(batch)
                async with self._changed:
                    self._written += len(batch)
                    self._changed.notify_all()
        except BaseException as error:
            # Whatever ended the writer is what every later caller is told.
            async with self._changed:
                self._failure = error
                self._changed.notify_all()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _next_batch(self) -> list[Piece]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._queue or self._closed or self._flush_now)
            if self._queue and not (self._closed or self._flush_now):
                await self._wait_for_cadence()
            batch, self._queue = self._queue, []
            self._queued_bytes = 0
            if batch or not self._closed:
                # A flush that came before the first piece must not turn into a busy loop.
                self._flush_now = False
            self._changed.notify_all()
        if not batch and not self._closed:
            return await self._next_batch()
        return batch

    async def _wait_for_cadence(self) -> None:
        def due() -> bool:
            return self._queued_bytes >= PARTIAL_FLUSH_BYTES or self._closed or self._flush_now

        try:
            async with asyncio.timeout(PARTIAL_FLUSH_S):
                await self._changed.wait_for(due)
        except TimeoutError:
            return


class RecordingSink:
    """The sink a model is given: closed with its response or its cancellation (seed 4.2 #21)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._size = 0
        self._closed = False

    async def text(self, delta: str) -> None:
        """Take a piece of the answer."""
        await self._take(TEXT, delta)

    async def thinking(self, delta: str) -> None:
        """Take a piece of the reasoning."""
        await self._take(THINKING, delta)

    def close(self) -> None:
        """Refuse whatever still comes."""
        self._closed = True

    async def _take(self, channel: str, delta: str) -> None:
        if self._closed:
            raise SinkClosed("the response has ended; nothing more can be streamed into it")
        self._size += len(delta)
        if self._size > ANSWER_PARTS_BYTES_MAX:
            raise ModelProtocolError("the stream is longer than any answer", retryable=False)
        for start in range(0, len(delta), _PIECE_CHARS_MAX):
            await self._recorder.record(channel, delta[start : start + _PIECE_CHARS_MAX])
