"""Real workers crash at every point of a turn: effects, model calls and results are as promised.

What is expected of a case follows from what was durable when its worker was lost (DESIGN 5), and
is written down here as tables. `make test` runs a sample that covers every point; the whole matrix
(`make faults`) also writes its result into the docs.
"""

import os
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import pytest
import pytest_asyncio
from harness.crash_promises import assert_promises
from harness.crash_report import Report
from harness.crash_run import SAFETIES, Campaign, Case, Crash, Point, Seen, Signal, Where
from temporalio.client import Client

from perdure.cli.dev_server import DevServer
from perdure.contracts.events import ModelPrepared

FULL = os.environ.get("PERDURE_FAULTS") == "full"
# Cases that run at once; a case is two processes that mostly wait. 1 where others share the cases.
WIDTH = 1 if "PYTEST_XDIST_WORKER" in os.environ else 6 if FULL else 4

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(400)]


class Lost(StrEnum):
    """How far a call had come, durably, when its worker was lost."""

    NOTHING = "T1 is not committed"
    DISPATCH = "T1 is committed, the effect has not started"
    EFFECT = "the effect has started, T2 is not committed"
    OUTCOME = "T2 is committed"


TOOL_POINTS = {
    Point("dispatch_call.before", Where.STORE): Lost.NOTHING,
    Point("dispatch_call.inside", Where.STORE): Lost.NOTHING,
    Point("dispatch_call.committed", Where.STORE): Lost.DISPATCH,
    Point("tool.dispatched", Where.LOOP): Lost.DISPATCH,
    Point("tool.before_effect", Where.LOOP): Lost.DISPATCH,
    Point("effect", Where.TOOL): Lost.EFFECT,
    Point("tool.effect_done", Where.LOOP): Lost.EFFECT,
    Point("settle_call.before", Where.STORE): Lost.EFFECT,
    Point("settle_call.inside", Where.STORE): Lost.EFFECT,
    Point("settle_call.committed", Where.STORE): Lost.OUTCOME,
}
TOOL_ACKNOWLEDGEMENTS = (
    Point("dispatch_call.committed=error", Where.NOTHING),
    Point("settle_call.committed=error", Where.NOTHING),
)


class Bought(StrEnum):
    """How far a model step had come, durably, when its worker was lost."""

    NOTHING = "the model was not called"
    ASKED = "the model was called, its answer is not committed"
    ANSWER = "the answer is committed"


LOOK = "use look"
MODEL_POINTS = {
    Point("prepare_step.before", Where.STORE, LOOK): (1, Bought.NOTHING),
    Point("prepare_step.inside", Where.STORE, LOOK): (1, Bought.NOTHING),
    Point("prepare_step.committed", Where.STORE, LOOK): (1, Bought.NOTHING),
    Point("stream", Where.STREAM, "stream held"): (1, Bought.ASKED),
    Point("model.streamed", Where.LOOP, "stream"): (1, Bought.ASKED),
    Point("model.answered", Where.LOOP, LOOK): (1, Bought.ASKED),
    Point("commit_answer.before", Where.STORE, LOOK): (1, Bought.ASKED),
    Point("commit_answer.inside", Where.STORE, LOOK): (1, Bought.ASKED),
    Point("commit_answer.committed", Where.STORE, LOOK): (1, Bought.ANSWER),
    Point("prepare_step.before@2", Where.STORE, LOOK): (2, Bought.NOTHING),
    Point("prepare_step.committed@2", Where.STORE, LOOK): (2, Bought.NOTHING),
    Point("model.answered@2", Where.LOOP, LOOK): (2, Bought.ASKED),
    Point("commit_answer.before@2", Where.STORE, LOOK): (2, Bought.ASKED),
    Point("commit_answer.inside@2", Where.STORE, LOOK): (2, Bought.ASKED),
    Point("commit_answer.committed@2", Where.STORE, LOOK): (2, Bought.ANSWER),
}
MODEL_ACKNOWLEDGEMENTS = (
    Point("prepare_step.committed=error", Where.NOTHING, LOOK),
    Point("commit_answer.committed=error", Where.NOTHING, LOOK),
    Point("commit_answer.committed=error@2", Where.NOTHING, LOOK),
)


def signals(point: Point) -> tuple[Signal, ...]:
    """What can happen at a point: who is frozen inside a transaction holds the lock."""
    if point.where is Where.NOTHING:
        return (Signal.NONE,)
    frozen = (Signal.STOP_LOCKED, Signal.KILL_LOCKED) if ".inside" in point.name else (Signal.STOP,)
    return (Signal.KILL, Signal.TERM, *frozen)


MATRIX = [
    Case(point, tool, signal)
    for point in (*TOOL_POINTS, *TOOL_ACKNOWLEDGEMENTS)
    for tool in SAFETIES
    for signal in signals(point)
] + [
    Case(point, "look" if point.message == LOOK else "", signal)
    for point in (*MODEL_POINTS, *MODEL_ACKNOWLEDGEMENTS)
    for signal in signals(point)
]

# At each point, the tool whose safety has the most to lose there.
KILLED = {
    "dispatch_call.before": "send",
    "dispatch_call.inside": "pay",
    "dispatch_call.committed": "send",
    "dispatch_call.committed=error": "send",
    "tool.dispatched": "ship",
    "tool.before_effect": "send",
    "tool.effect_done": "pay",
    "settle_call.before": "send",
    "settle_call.inside": "ship",
    "settle_call.committed": "look",
    "settle_call.committed=error": "send",
}
LOCKED = {
    ("dispatch_call.inside", "send", Signal.STOP_LOCKED),
    ("settle_call.inside", "send", Signal.KILL_LOCKED),
}


def in_sample(case: Case) -> bool:
    """Whether `make test` runs the case: every point, and every signal for every safety once."""
    point = case.point.name
    if case.signal in (Signal.STOP_LOCKED, Signal.KILL_LOCKED):
        return (point, case.tool, case.signal) in LOCKED
    if point == "effect" or point == "stream":
        return True
    if case.signal in (Signal.KILL, Signal.NONE):
        return KILLED.get(point, case.tool) == case.tool
    return False


SAMPLE = [case for case in MATRIX if in_sample(case)]


@dataclass(frozen=True)
class Expected:
    """What a case must come to. Ranges are given only where a zombie races with its cancellation.

    `late_effects` are the effects that a zombie starts after the turn has ended.
    """

    effects: tuple[int, ...] = (1,)
    status: tuple[str, ...] = ("ok",)
    generations: tuple[int, ...] = (1,)
    late_effects: tuple[int, ...] = (0,)
    late_results: tuple[int, ...] = (0,)
    asked: tuple[tuple[int, ...], tuple[int, ...]] = ((1,), (1,))


ONCE = Expected()
AGAIN = Expected(generations=(2,))
TWICE = Expected(effects=(2,), generations=(2,))
NEVER_KNOWN = Expected(status=("interrupted",))

CALL: dict[tuple[Lost, str], Expected] = {
    # Nothing was allowed yet, so the call simply runs.
    **{(Lost.NOTHING, tool): ONCE for tool in SAFETIES},
    # The effect may have started, as far as anybody knows: SAFE and KEYED run again.
    (Lost.DISPATCH, "look"): AGAIN,
    (Lost.DISPATCH, "pay"): AGAIN,
    # Its own function says NOT_EXECUTED, which allows one more generation.
    (Lost.DISPATCH, "ship"): AGAIN,
    # Nobody may start it a second time, and nobody can know that it never started.
    (Lost.DISPATCH, "send"): replace(NEVER_KNOWN, effects=(0,)),
    (Lost.EFFECT, "look"): TWICE,
    (Lost.EFFECT, "pay"): TWICE,
    # Its own function finds the effect: that is the outcome.
    (Lost.EFFECT, "ship"): ONCE,
    (Lost.EFFECT, "send"): NEVER_KNOWN,
    **{(Lost.OUTCOME, tool): ONCE for tool in SAFETIES},
}


def lost(case: Case) -> Lost:
    """How far the case's call had come when its worker was lost."""
    point, signal = case.point.name, case.signal
    if signal is Signal.TERM and point in ("dispatch_call.before", "dispatch_call.inside"):
        # A command that was begun is brought to its end, but no effect starts after the grace.
        return Lost.DISPATCH
    if signal in (Signal.TERM, Signal.STOP_LOCKED) and point == "settle_call.inside":
        # Whoever holds the lock comes first: the others wait until its T2 is committed.
        return Lost.OUTCOME
    return TOOL_POINTS.get(case.point, Lost.OUTCOME)


def expected_call(case: Case, *, given_up: bool) -> Expected:
    """What the case's call must come to."""
    if case.point in MODEL_POINTS or case.point in MODEL_ACKNOWLEDGEMENTS:
        return ONCE
    how_far = lost(case)
    if case.signal is Signal.STOP_LOCKED and how_far is Lost.NOTHING:
        return AWAKE_IN_T1[case.tool]
    expected = CALL[how_far, case.tool]
    if given_up and how_far is not Lost.OUTCOME:
        # Four executions of the gate went to the frozen worker's open polls (DESIGN 5).
        expected = GIVEN_UP[how_far]
    if case.signal is Signal.STOP:
        return replace(expected, **zombie(case, how_far))
    if case.signal is Signal.TERM and case.point.name == "settle_call.before":
        return replace(expected, late_results=(1,))
    return expected


GIVEN_UP = {
    Lost.NOTHING: Expected(effects=(0,), status=("not_executed",), generations=(0,)),
    Lost.DISPATCH: replace(NEVER_KNOWN, effects=(0,)),
    Lost.EFFECT: NEVER_KNOWN,
}

# A worker that wakes inside T1 commits a dispatch whose sign of life is old already, and goes on
# with the effect unless it first hears that Temporal has given it up. Meanwhile its successor may
# decide on the loss, and the attempts that were handed to the frozen worker meanwhile wake as well:
# SAFE and KEYED may run in both. Whoever is first, `assert_promises` holds what is promised.
BOTH_RUN = Expected(effects=(1, 2, 3), generations=(1, 2, 3, 4), late_results=(0, 1, 2))
AWAKE_IN_T1 = {
    "look": BOTH_RUN,
    "pay": BOTH_RUN,
    "ship": Expected(generations=(1, 2), late_results=(0, 1)),
    "send": Expected(effects=(0, 1), status=("ok", "interrupted"), late_results=(0, 1)),
}


def zombie(case: Case, how_far: Lost) -> dict[str, tuple[int, ...]]:
    """What a zombie still does once the turn has ended without it."""
    if how_far is Lost.EFFECT:
        # A coroutine that is SAFE is cancelled with its activity: its result may not come.
        cancelled = case.point.where is Where.TOOL and case.tool == "look"
        return {"late_results": (0, 1) if cancelled else (1,)}
    if how_far is not Lost.DISPATCH or case.tool == "ship":
        # T1 refuses it, or the callee does: its generation is fenced.
        return {}
    # It holds the one permission that there is, and nothing tells it that nobody waits any more.
    # In T1 the news that Temporal has given it up may come first; later it stops SAFE and KEYED.
    if case.tool == "send" and case.point.where is Where.LOOP:
        return {"late_effects": (1,), "late_results": (1,)}
    return {"late_effects": (0, 1), "late_results": (0, 1)}


def expected_asked(case: Case, attempts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How often the model is asked for steps 1 and 2: once, and once more where it was in vain.

    `attempts` are those that the ledger has of the first step.
    """
    step, bought = MODEL_POINTS.get(case.point, (1, Bought.ANSWER))
    through = case.signal in (Signal.TERM, Signal.STOP_LOCKED) and case.point.where is Where.STORE
    # A commit that was begun is brought to its end; who holds the lock comes first.
    times: tuple[int, ...] = (2,) if bought is Bought.ASKED and not through else (1,)
    wakes_before_its_call = case.point.name.startswith("prepare_step.committed") or (
        case.point.name.startswith("prepare_step.inside") and case.signal is Signal.STOP_LOCKED
    )
    if case.signal in (Signal.STOP, Signal.STOP_LOCKED) and wakes_before_its_call:
        # A zombie may ask too, before it hears that it is superseded; in a frozen worker that held
        # the lock, the attempts that were handed to it meanwhile wake as well.
        locked = case.signal is Signal.STOP_LOCKED
        times = tuple(range(1, attempts + 1)) if locked else (1, 2)
    rest = (0,) if case.message.startswith("stream") else (1,)
    return (times, rest) if step == 1 else ((1,), times)


@pytest.fixture(scope="module")
def report() -> Report:
    """The table of the whole matrix."""
    return Report(Path(__file__).parents[2] / "docs" / "fault-results.md", MATRIX)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def campaign(
    request: pytest.FixtureRequest,
    client: Client,
    server: DevServer,
    report: Report,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Campaign]:
    """The cases that this run has chosen."""
    root = tmp_path_factory.mktemp("crash")

    async def run(case: Case) -> Seen:
        owed = expected_call(case, given_up=False).late_results == (1,)
        crash = Crash(case, client, server.address, root / str(case), owes_late_result=owed)
        return await crash.run()

    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    campaign = Campaign(run, chosen, WIDTH)
    yield campaign
    await campaign.close()
    if FULL:
        report.write()


@pytest.mark.parametrize("case", SAMPLE, ids=str)
async def test_a_crashed_worker_breaks_no_promise_in_the_sample(
    campaign: Campaign, report: Report, case: Case
) -> None:
    await judge(campaign, report, case)


@pytest.mark.faults
@pytest.mark.skipif(not FULL, reason="the whole matrix is for PERDURE_FAULTS=full")
@pytest.mark.parametrize("case", MATRIX, ids=str)
async def test_a_crashed_worker_breaks_no_promise_anywhere(
    campaign: Campaign, report: Report, case: Case
) -> None:
    await judge(campaign, report, case)


async def judge(campaign: Campaign, report: Report, case: Case) -> None:
    """Wait for the case and hold what it left against what is expected."""
    seen = await campaign.seen(case)
    try:
        assert_promises(case, seen)
        assert_expected_call(case, seen)
        assert_model(case, seen)
    except AssertionError:
        report.add(case, seen, passed=False)
        raise
    report.add(case, seen, passed=True)


def assert_expected_call(case: Case, seen: Seen) -> None:
    """The numbers of the call, as the tables have them."""
    operation = seen.operation
    if operation is None:
        assert case.message.startswith("stream")
        return
    expected = expected_call(case, given_up=seen.given_up)
    assert len(seen.effects) - seen.late_effects in expected.effects
    assert operation.status in expected.status
    assert len(operation.generations) in expected.generations
    assert seen.late_effects in expected.late_effects
    assert len(seen.details.late_results) in expected.late_results
    assert not seen.given_up or case.signal in (Signal.STOP, Signal.STOP_LOCKED)
    if operation.status == "interrupted":
        assert operation.reason == "worker_lost"
        # The progress that the effect had committed is what the model is told of it.
        if lost(case) is Lost.EFFECT and case.tool == "send":
            assert "half sent" in str(operation.text)


def assert_model(case: Case, seen: Seen) -> None:
    """A committed answer is never bought again; a lost one is bought once more."""
    attempts = Counter(attempt.step for attempt in seen.details.model_attempts)
    for step, asked in seen.model_calls.items():
        assert asked <= attempts[step], "each call of the model is an attempt in the ledger"
    first, second = expected_asked(case, attempts[1])
    assert seen.model_calls[1] in first
    assert seen.model_calls[2] in second
    steps = seen.details.turn.steps
    committed = [x.step for x in seen.details.model_attempts if x.status == "committed"]
    assert committed == list(range(1, steps + 1))
    prepared = [event.step for event in seen.events if isinstance(event, ModelPrepared)]
    assert prepared == committed, "a retry sends the same prepared request"
    if MODEL_POINTS.get(case.point, (0, None))[1] is Bought.ASKED and steps == 1:
        assert seen.result.answer == "one two three"
        (aborted,) = seen.details.aborted_partials
        assert (aborted.attempt, aborted.text[:4]) == (1, "one ")
