"""The tables of the benchmark as Markdown, and their place in `docs/benchmarks.md`.

The words around the tables are written by hand; only what stands between the two marks is replaced.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from measure import CONCURRENT, History, Measured, Prior

BEGIN: Final = "<!-- results: written by benchmarks/run.py -->"
END: Final = "<!-- end of results -->"

CPU_RATIO_MAX: Final = 1.4
LATENCY_RATIO_MAX: Final = 1.25
THROUGHPUT_RATIO_MIN: Final = 0.8
HISTORY_EVENTS_MAX: Final = 23
HISTORY_BYTES_MAX: Final = 4096
HISTORY_GROWTH_MAX: Final = 0.02
FIFTY_CALLS_BYTES_MAX: Final = 110_000

Table = list[list[str]]


@dataclass(frozen=True)
class Results:
    """Everything one run has found."""

    heading: str
    sides: dict[str, Measured]
    fsync_s: float
    prior: list[Prior]
    histories: dict[int, tuple[History, History]]
    fifty_at_once: History
    fifty_in_a_row: History

    @property
    def broken_limits(self) -> list[str]:
        """The limits of the history that do not hold."""
        none, *others = (perdure for _, perdure in self.histories.values())
        broken: list[str] = []
        if none.events > HISTORY_EVENTS_MAX or none.bytes > HISTORY_BYTES_MAX:
            broken.append(f"a one-tool turn has {none.events} events and {none.bytes} bytes")
        if any(abs(other.bytes - none.bytes) > HISTORY_GROWTH_MAX * none.bytes for other in others):
            broken.append("the history grows with the conversation")
        for name, fifty in (("at once", self.fifty_at_once), ("in a row", self.fifty_in_a_row)):
            if fifty.bytes > FIFTY_CALLS_BYTES_MAX:
                broken.append(f"50 calls of 5 KB {name} make {fifty.bytes} bytes")
        return broken


def render(results: Results) -> str:
    """All tables."""
    sections = [
        results.heading,
        "### Speed",
        markdown(_speed(results)),
        f"One fsync of 4 KiB in the ledger's folder took {_ms(results.fsync_s)} "
        f"in the median; {_transactions(results)}.",
        "### Size of the history",
        markdown(_history(results)),
        "### Long conversations",
        markdown(_prior(results)),
        "### Where the worker's CPU goes",
        markdown(_threads(results)),
        markdown(_commands(results)),
    ]
    return "\n\n".join(section for section in sections if section)


def write_into(path: Path, text: str) -> None:
    """Replace what stands between the marks of the page."""
    page = path.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{path} lacks the marks between which the results go"
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", "utf-8")


def markdown(table: Table) -> str:
    """A table whose first row is its head; numbers stand to the right."""
    if len(table) < 2:
        return ""
    rows = [table[0], ["---", *("---:" for _ in table[0][1:])], *table[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _speed(results: Results) -> Table:
    bare = results.sides["bare"]
    others = {name: side for name, side in results.sides.items() if name != "bare"}
    head = ["one-tool turn, median", "bare"]
    for name in others:
        head += [name, "ratio"]
    table = [[*head, "target"]]
    for label, name, show, target in (
        ("worker CPU, one turn at a time", "cpu_s", _ms, f"at most {CPU_RATIO_MAX}"),
        (f"worker CPU, {CONCURRENT} at once", "burst_cpu_s", _ms, f"at most {CPU_RATIO_MAX}"),
        ("latency, one turn at a time", "latency_s", _ms, f"at most {LATENCY_RATIO_MAX}"),
        (
            f"throughput, {CONCURRENT} at once",
            "turns_per_s",
            _per_s,
            f"at least {THROUGHPUT_RATIO_MIN}",
        ),
    ):
        row = [label, show(bare.middle(name))]
        for side in others.values():
            row += [show(side.middle(name)), f"{side.middle(name) / bare.middle(name):.2f}"]
        table.append([*row, target])
    return table


def _history(results: Results) -> Table:
    table = [["history of one turn", "bare", "perdure", "limit"]]
    for number, (bare, perdure) in results.histories.items():
        limit = f"{HISTORY_EVENTS_MAX} events, {HISTORY_BYTES_MAX} bytes"
        if number:
            limit = f"as without, within {HISTORY_GROWTH_MAX:.0%}"
        label = f"one tool, {number} messages before it"
        table.append([label, _size(bare), _size(perdure), limit])
    limit = f"{FIFTY_CALLS_BYTES_MAX} bytes"
    table.append(["50 calls of 5 KB, at once", "", _size(results.fifty_at_once), limit])
    table.append(["50 calls of 5 KB, in a row", "", _size(results.fifty_in_a_row), limit])
    return table


def _prior(results: Results) -> Table:
    table = [["messages of 500 characters before the turn", "latency", "worker CPU"]]
    table.extend(
        [str(prior.messages), _ms(prior.latency_s), _ms(prior.cpu_s)] for prior in results.prior
    )
    return table


def _threads(results: Results) -> Table:
    sides = results.sides
    names = {name for side in sides.values() for name in side.spending.threads_s}
    table = [["CPU per turn, one at a time", *sides]]
    for name in sorted(names):
        row = [side.spending.threads_s[name] / side.spending.turns for side in sides.values()]
        table.append([name, *(_ms(seconds) for seconds in row)])
    return table


def _commands(results: Results) -> Table:
    spending = results.sides["perdure"].spending
    table = [["ledger command (a transaction or a read)", "per turn", "CPU of one", "CPU per turn"]]
    for name, seconds in spending.commands_s.most_common():
        calls = spending.commands[name]
        if calls >= spending.turns:
            each = [f"{calls / spending.turns:.0f}", _ms(seconds / calls)]
            table.append([f"`{name}`", *each, _ms(seconds / spending.turns)])
    return table


def _transactions(results: Results) -> str:
    spending = results.sides["perdure"].spending
    commits = sum(
        calls for name, calls in spending.commands.items() if name.startswith("transact ")
    )
    return f"a one-tool turn commits {commits / spending.turns:.0f} transactions"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _per_s(number: float) -> str:
    return f"{number:.0f}/s"


def _size(history: History) -> str:
    return f"{history.events} events, {history.bytes} bytes"
