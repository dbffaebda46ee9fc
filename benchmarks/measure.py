"""Measuring: blocks of turns on one side at a time, in rounds in which the sides take turns.

A slow minute of the machine hits both sides alike, so that the ratio of medians means something
where the milliseconds do not.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sides import Side

CONCURRENT = 50
_FSYNC_BYTES = 4096


@dataclass
class Block:
    """One side in one round: latencies one at a time, then a burst, with the worker's CPU."""

    latency_s: float
    cpu_s: float
    burst_cpu_s: float
    turns_per_s: float


@dataclass
class Spending:
    """What the turns of a side cost in sum, by kind of thread and by ledger command."""

    turns: int = 0
    cpu_s: float = 0.0
    threads_s: Counter[str] = field(default_factory=Counter[str])
    commands_s: Counter[str] = field(default_factory=Counter[str])
    commands: Counter[str] = field(default_factory=Counter[str])

    def add(self, before: dict[str, Any], after: dict[str, Any], turns: int) -> None:
        """Count what was used between two readings of the worker."""
        self.turns += turns
        self.cpu_s += after["cpu_s"] - before["cpu_s"]
        for name in ("threads_s", "commands_s", "commands"):
            counter: Counter[str] = getattr(self, name)
            counter.update(after[name])
            counter.subtract({key: before[name].get(key, 0) for key in after[name]})


@dataclass
class Measured:
    """Everything measured of one side."""

    blocks: list[Block] = field(default_factory=list[Block])
    spending: Spending = field(default_factory=Spending)

    def middle(self, name: str) -> float:
        """The median over the rounds."""
        return median(getattr(block, name) for block in self.blocks)


async def rounds(
    sides: Sequence[Side], number: int, *, turns: int, burst: int
) -> dict[str, Measured]:
    """Measure the sides in turn, each round in the opposite order of the one before."""
    measured = {side.name: Measured() for side in sides}
    for side in sides:
        await _block(side, Spending(), turns=max(turns // 4, 2), burst=1)
    for index in range(number):
        for side in sides if index % 2 == 0 else reversed(sides):
            found = measured[side.name]
            found.blocks.append(await _block(side, found.spending, turns=turns, burst=burst))
    return measured


async def _block(side: Side, spending: Spending, *, turns: int, burst: int) -> Block:
    before = await side.worker.read()
    latencies: list[float] = []
    for _ in range(turns):
        value = await side.prepare(0)
        begun = time.perf_counter()
        await side.run(value)
        latencies.append(time.perf_counter() - begun)
    between = await side.worker.read()
    spending.add(before, between, turns)

    async def one_after_another() -> None:
        for _ in range(burst):
            await side.run(await side.prepare(0))

    begun = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(CONCURRENT)))
    took = time.perf_counter() - begun
    after = await side.worker.read()
    return Block(
        latency_s=median(latencies),
        cpu_s=(between["cpu_s"] - before["cpu_s"]) / turns,
        burst_cpu_s=(after["cpu_s"] - between["cpu_s"]) / (CONCURRENT * burst),
        turns_per_s=CONCURRENT * burst / took,
    )


@dataclass(frozen=True)
class Prior:
    """Turns on conversations with messages before them."""

    messages: int
    latency_s: float
    cpu_s: float


async def with_prior(side: Side, messages: Sequence[int], *, turns: int) -> list[Prior]:
    """Latency and CPU by the number of prior messages; the numbers take turns."""
    latencies: dict[int, list[float]] = {number: [] for number in messages}
    cpu: dict[int, float] = dict.fromkeys(messages, 0.0)
    for _ in range(turns):
        for number in messages:
            value = await side.prepare(number)
            before = await side.worker.read()
            begun = time.perf_counter()
            await side.run(value)
            latencies[number].append(time.perf_counter() - begun)
            cpu[number] += (await side.worker.read())["cpu_s"] - before["cpu_s"]
    return [Prior(number, median(latencies[number]), cpu[number] / turns) for number in messages]


@dataclass(frozen=True)
class History:
    """How long a turn's history is."""

    events: int
    bytes: int


async def history_of(side: Side, prior: int = 0) -> History:
    """Run one turn and weigh its history."""
    handle = await side.start(await side.prepare(prior))
    await handle.result()
    history = await handle.fetch_history()
    return History(len(history.events), sum(event.ByteSize() for event in history.events))


def fsync_s(folder: Path, number: int = 50) -> float:
    """The median of writing 4 KiB into a file of that folder and forcing it to the disk."""
    taken: list[float] = []
    path = folder / "fsync"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(number):
            begun = time.perf_counter()
            os.pwrite(descriptor, b"x" * _FSYNC_BYTES, 0)
            os.fsync(descriptor)
            taken.append(time.perf_counter() - begun)
    finally:
        os.close(descriptor)
        path.unlink()
    return median(taken)
