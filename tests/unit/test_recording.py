"""The recorder: durable before delivered, in order, bounded, and loud when the store fails."""

import asyncio

import pytest

from perdure.activities.recorder import Piece, Recorder, RecordingSink
from perdure.contracts.errors import RecorderFull, RecorderStopped, SinkClosed
from perdure.contracts.limits import (
    PARTIAL_FLUSH_BYTES,
    RECORDER_BYTES_MAX,
    RECORDER_COMMANDS_MAX,
)


class Disk:
    """Makes pieces durable when the test opens it."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[Piece]] = []
        self.positions: list[int] = []
        self.delivered: list[Piece] = []
        self.failure: Exception | None = None
        self.opened = asyncio.Event()
        self.asked = asyncio.Event()
        if is_open:
            self.opened.set()

    async def persist(self, position: int, pieces: list[Piece]) -> int:
        """Write a batch."""
        self.asked.set()
        await self.opened.wait()
        if self.failure is not None:
            raise self.failure
        self.positions.append(position)
        self.batches.append(pieces)
        return position + len(pieces)

    async def deliver(self, pieces: list[Piece]) -> None:
        """Show a batch; whatever is shown must be on the disk."""
        assert pieces in self.batches
        self.delivered.extend(pieces)

    @property
    def texts(self) -> str:
        """All that is durable."""
        return "".join(text for batch in self.batches for _, text in batch)


async def test_what_is_delivered_was_durable_before_and_keeps_its_order() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist, disk.deliver)

    for number in range(300):
        await recorder.record("text", f"{number} ")
    await recorder.flush()

    assert disk.texts == "".join(f"{number} " for number in range(300))
    assert [text for _, text in disk.delivered] == [f"{number} " for number in range(300)]
    assert disk.positions[0] == 1
    await recorder.close()


async def test_the_first_piece_is_written_at_once() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)

    await recorder.record("text", "first")
    await asyncio.wait_for(disk.asked.wait(), 5)
    await recorder.close()

    assert disk.batches[0] == [("text", "first")]


async def test_eight_kib_are_written_without_waiting_for_the_cadence() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    await recorder.record("text", "first")
    await recorder.flush()

    disk.asked.clear()
    await recorder.record("text", "x" * PARTIAL_FLUSH_BYTES)
    await asyncio.wait_for(disk.asked.wait(), 5)
    await recorder.close()

    assert len(disk.batches) == 2


async def test_a_full_queue_refuses_and_drops_nothing() -> None:
    disk = Disk(is_open=False)
    recorder = Recorder(disk.persist)
    recorder.try_record("text", "0")
    await asyncio.wait_for(disk.asked.wait(), 5)

    for _ in range(RECORDER_COMMANDS_MAX):
        recorder.try_record("text", "x")
    with pytest.raises(RecorderFull):
        recorder.try_record("text", "y")
    disk.opened.set()
    await recorder.close()

    assert disk.texts == "0" + "x" * RECORDER_COMMANDS_MAX


async def test_a_used_up_byte_budget_refuses_too() -> None:
    disk = Disk(is_open=False)
    recorder = Recorder(disk.persist)
    third = "x" * (RECORDER_BYTES_MAX // 3 + 1)

    recorder.try_record("text", third)
    recorder.try_record("text", third)
    with pytest.raises(RecorderFull):
        recorder.try_record("text", third)
    disk.opened.set()
    await recorder.close()

    assert len(disk.texts) == 2 * len(third)


async def test_a_waiting_record_goes_on_when_there_is_room() -> None:
    disk = Disk(is_open=False)
    recorder = Recorder(disk.persist)
    recorder.try_record("text", "0")
    await asyncio.wait_for(disk.asked.wait(), 5)
    for _ in range(RECORDER_COMMANDS_MAX):
        recorder.try_record("text", "x")

    waiting = asyncio.create_task(recorder.record("text", "last"))
    disk.opened.set()
    await asyncio.wait_for(waiting, 5)
    await recorder.close()

    assert disk.texts.endswith("xlast")


async def test_flush_waits_until_everything_before_it_is_durable() -> None:
    disk = Disk(is_open=False)
    recorder = Recorder(disk.persist)
    recorder.try_record("text", "a")

    flushing = asyncio.create_task(recorder.flush())
    await asyncio.wait_for(disk.asked.wait(), 5)
    assert not flushing.done()
    disk.opened.set()
    await asyncio.wait_for(flushing, 5)

    assert disk.texts == "a"
    await recorder.close()


async def test_a_failing_store_ends_the_recorder_loudly() -> None:
    disk = Disk()
    disk.failure = OSError("the disk is gone")
    recorder = Recorder(disk.persist, disk.deliver)
    recorder.try_record("text", "a")

    with pytest.raises(RecorderStopped) as caught:
        await recorder.flush()
    with pytest.raises(RecorderStopped):
        await recorder.record("text", "b")

    assert caught.value.__cause__ is disk.failure
    assert disk.delivered == []
    with pytest.raises(RecorderStopped):
        await recorder.close()


async def test_a_sink_refuses_what_comes_after_its_response() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    sink = RecordingSink(recorder)
    await sink.text("in time")
    await sink.thinking("too")
    sink.close()

    with pytest.raises(SinkClosed):
        await sink.text("late")
    await recorder.close()

    assert disk.texts == "in timetoo"


async def test_a_delta_of_any_length_is_taken_piece_by_piece() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    sink = RecordingSink(recorder)
    long = "abc" * 3_000_000

    await sink.text(long)
    await recorder.close()

    assert disk.texts == long
