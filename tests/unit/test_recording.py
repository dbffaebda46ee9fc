"""The recorder: durable before delivered, in order, bounded, and loud when the store fails."""

import asyncio

import pytest

from perdure.activities.recorder import Piece, Recorder, RecordingSink
from perdure.contracts.errors import ModelProtocolError, RecorderFull, RecorderStopped, SinkClosed
from perdure.contracts.limits import (
    ANSWER_PARTS_BYTES_MAX,
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


async def test_a_burst_without_yielding_is_taken_up_to_the_bound_and_all_of_it_delivered() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist, disk.deliver)

    # The writer has not run yet: exactly so many fit.
    for number in range(RECORDER_COMMANDS_MAX):
        recorder.try_record("text", f"{number} ")
    with pytest.raises(RecorderFull):
        recorder.try_record("text", "one too many")
    await recorder.flush()

    assert [text for _, text in disk.delivered] == [
        f"{number} " for number in range(RECORDER_COMMANDS_MAX)
    ]
    await recorder.close()


async def test_the_byte_budget_counts_bytes_and_frees_them_once_they_are_written() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    half = "é" * (RECORDER_BYTES_MAX // 4)

    recorder.try_record("text", half)
    recorder.try_record("text", half)
    with pytest.raises(RecorderFull):
        recorder.try_record("text", "x")
    await recorder.flush()
    recorder.try_record("text", "x")
    await recorder.close()

    assert disk.texts == half + half + "x"


async def test_a_piece_that_can_never_fit_is_refused_at_once() -> None:
    recorder = Recorder(Disk().persist)
    larger = "x" * (RECORDER_BYTES_MAX + 1)

    with pytest.raises(RecorderFull):
        recorder.try_record("text", larger)
    with pytest.raises(RecorderFull):
        await recorder.record("text", larger)
    await recorder.close()


async def test_a_record_waits_for_bytes_and_keeps_its_place() -> None:
    disk = Disk(is_open=False)
    recorder = Recorder(disk.persist)
    recorder.try_record("text", "0")
    await asyncio.wait_for(disk.asked.wait(), 5)
    recorder.try_record("text", "x" * RECORDER_BYTES_MAX)

    waiting = asyncio.create_task(recorder.record("text", "last"))
    await asyncio.wait({waiting}, timeout=0)
    assert not waiting.done()
    disk.opened.set()
    await asyncio.wait_for(waiting, 5)
    await recorder.close()

    assert disk.texts == "0" + "x" * RECORDER_BYTES_MAX + "last"


async def test_flush_waits_until_what_is_durable_is_delivered_too() -> None:
    disk = Disk()
    shown, may_show = asyncio.Event(), asyncio.Event()

    async def slowly(pieces: list[Piece]) -> None:
        shown.set()
        await may_show.wait()
        await disk.deliver(pieces)

    recorder = Recorder(disk.persist, slowly)
    recorder.try_record("text", "a")
    flushing = asyncio.create_task(recorder.flush())
    await asyncio.wait_for(shown.wait(), 5)
    assert disk.texts == "a"
    assert not flushing.done()

    # Who does not take what is delivered holds the stream up; nothing is dropped.
    for _ in range(RECORDER_COMMANDS_MAX):
        recorder.try_record("text", "b")
    with pytest.raises(RecorderFull):
        recorder.try_record("text", "b")
    may_show.set()
    await asyncio.wait_for(flushing, 5)
    await recorder.close()

    assert [text for _, text in disk.delivered] == ["a"] + ["b"] * RECORDER_COMMANDS_MAX


async def test_flush_of_nothing_returns_and_does_not_keep_the_writer_busy() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)

    await asyncio.wait_for(recorder.flush(), 5)
    recorder.try_record("text", "a")
    await asyncio.wait_for(recorder.flush(), 5)
    await asyncio.wait_for(recorder.flush(), 5)
    await recorder.close()

    assert disk.batches == [[("text", "a")]]


async def test_little_text_is_written_with_the_cadence_and_without_a_flush() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    await recorder.record("text", "first")
    await recorder.flush()

    disk.asked.clear()
    await recorder.record("text", "and ")
    await recorder.record("text", "more")
    await asyncio.wait_for(disk.asked.wait(), 5)
    await recorder.close()

    assert disk.batches == [[("text", "first")], [("text", "and "), ("text", "more")]]


async def test_each_batch_starts_where_the_one_before_said() -> None:
    positions: list[int] = []

    async def persist(position: int, pieces: list[Piece]) -> int:
        positions.append(position)
        return position + 10 * len(pieces)

    recorder = Recorder(persist)
    for _ in range(3):
        recorder.try_record("text", "x")
        await recorder.flush()
    await recorder.close()

    assert positions == [1, 11, 21]


async def test_a_failure_wakes_who_waits_for_room_and_is_told_to_everybody_after() -> None:
    disk = Disk(is_open=False)
    disk.failure = OSError("the disk is gone")
    recorder = Recorder(disk.persist)
    recorder.try_record("text", "0")
    await asyncio.wait_for(disk.asked.wait(), 5)
    for _ in range(RECORDER_COMMANDS_MAX):
        recorder.try_record("text", "x")
    waiting = asyncio.create_task(recorder.record("text", "last"))
    flushing = asyncio.create_task(recorder.flush())

    disk.opened.set()
    for pending in (waiting, flushing):
        with pytest.raises(RecorderStopped):
            await asyncio.wait_for(pending, 5)
    with pytest.raises(RecorderStopped):
        recorder.try_record("text", "y")

    assert recorder.failure is disk.failure
    with pytest.raises(RecorderStopped):
        await recorder.close()


async def test_a_failing_delivery_ends_the_recorder_and_what_was_written_stays() -> None:
    disk = Disk()
    failure = ConnectionError("nobody listens")

    async def refuse(_pieces: list[Piece]) -> None:
        raise failure

    recorder = Recorder(disk.persist, refuse)
    recorder.try_record("text", "a")

    with pytest.raises(RecorderStopped) as caught:
        await recorder.flush()
    with pytest.raises(RecorderStopped):
        await recorder.close()

    assert caught.value.__cause__ is failure
    assert disk.texts == "a"


async def test_closing_writes_what_was_accepted_and_refuses_what_comes_after() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    recorder.try_record("text", "a")

    await recorder.close()
    await recorder.close()

    assert disk.texts == "a"
    with pytest.raises(SinkClosed):
        recorder.try_record("text", "b")
    with pytest.raises(SinkClosed):
        await recorder.record("text", "b")


async def test_a_sink_takes_no_more_than_any_answer_may_have() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    sink = RecordingSink(recorder)

    await sink.text("")
    await sink.text("x" * (ANSWER_PARTS_BYTES_MAX - 1))
    with pytest.raises(ModelProtocolError):
        await sink.thinking("yz")
    await recorder.close()

    assert len(disk.texts) == ANSWER_PARTS_BYTES_MAX - 1


async def test_a_sink_keeps_its_channels_apart_and_in_order() -> None:
    disk = Disk()
    recorder = Recorder(disk.persist)
    sink = RecordingSink(recorder)

    await sink.thinking("hm")
    await sink.text("yes")
    await sink.thinking("but")
    await recorder.close()

    assert [piece for batch in disk.batches for piece in batch] == [
        ("thinking", "hm"),
        ("text", "yes"),
        ("thinking", "but"),
    ]
