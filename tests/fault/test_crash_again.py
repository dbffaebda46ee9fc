"""The successor of a crashed worker crashes too, while it decides what became of the call."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.crash_promises import assert_promises
from harness.crash_run import Case, Point, SecondCrash, Signal, Where
from temporalio.client import Client

from perdure.cli.dev_server import DevServer

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(300)]

IN_EFFECT = Point("effect", Where.TOOL)
DISPATCHED = Point("dispatch_call.committed", Where.STORE)


@dataclass(frozen=True)
class Again:
    """Where two workers are killed one after the other, and what the call must come to."""

    tool: str
    first: Point
    then: str
    effects: int
    status: str
    generations: int

    def __str__(self) -> str:
        return f"{self.tool}-{self.first.name}-{self.then}"


# Close to the decision that the first loss asks for: before it, in it, and after it is committed.
SAMPLE = [
    Again("pay", IN_EFFECT, "tool.effect_done", 3, "ok", 3),
    Again("ship", IN_EFFECT, "report_reconcile.before", 1, "ok", 1),
    Again("ship", DISPATCHED, "report_reconcile.committed", 1, "ok", 2),
    Again("send", IN_EFFECT, "close_call.committed", 1, "interrupted", 1),
]
REST = [
    # The first visit only learns that the call is held; the second one is its T1.
    Again("look", IN_EFFECT, "dispatch_call.committed@2", 2, "ok", 3),
    Again("pay", DISPATCHED, "tool.before_effect", 1, "ok", 3),
    Again("ship", IN_EFFECT, "report_reconcile.inside", 1, "ok", 1),
    Again("ship", IN_EFFECT, "report_reconcile.committed", 1, "ok", 1),
    Again("ship", DISPATCHED, "report_reconcile.before", 1, "ok", 2),
    # The second generation had its effect: its own reconcile finds it.
    Again("ship", DISPATCHED, "tool.effect_done", 1, "ok", 2),
    Again("send", IN_EFFECT, "close_call.before", 1, "interrupted", 1),
    Again("send", IN_EFFECT, "close_call.inside", 1, "interrupted", 1),
    Again("send", DISPATCHED, "close_call.committed", 0, "interrupted", 1),
]


@pytest.mark.parametrize("again", SAMPLE, ids=str)
async def test_a_second_crash_breaks_no_promise_in_the_sample(
    client: Client, server: DevServer, tmp_path: Path, again: Again
) -> None:
    await crash_twice(client, server, tmp_path, again)


@pytest.mark.faults
@pytest.mark.parametrize("again", REST, ids=str)
async def test_a_second_crash_breaks_no_promise_anywhere(
    client: Client, server: DevServer, tmp_path: Path, again: Again
) -> None:
    await crash_twice(client, server, tmp_path, again)


async def crash_twice(client: Client, server: DevServer, folder: Path, again: Again) -> None:
    """Kill two workers; a third one has to bring the turn to its end."""
    case = Case(again.first, again.tool, Signal.KILL)
    crash = SecondCrash(case, client, server.address, folder / "crash", then=again.then)
    seen = await crash.run()
    assert_promises(case, seen)
    assert seen.operation is not None
    assert len(seen.effects) == again.effects
    assert (seen.operation.status, len(seen.operation.generations)) == (
        again.status,
        again.generations,
    )
    assert seen.model_calls == {1: 1, 2: 1}
