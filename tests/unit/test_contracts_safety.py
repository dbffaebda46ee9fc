"""The tables of replay safety, written out: a change of one cell must be meant."""

import itertools

import pytest

from perdure.contracts.safety import (
    FOR_EVER,
    ONE_ATTEMPT,
    REPEATED,
    RESCHEDULE_DELAYS_S,
    TEMPORAL_ATTEMPTS_MAX,
    TOOL_ERROR_TRIES,
    LostEffect,
    ReplaySafety,
    RetryPlan,
    after_lost_effect,
    backoff_s,
    retry_plan,
    stricter,
)

SAFE, KEYED, RECONCILED, UNSAFE = ReplaySafety


@pytest.mark.parametrize(
    ("safety", "attempts", "lost"),
    [
        (SAFE, 24, LostEffect.RERUN),
        (KEYED, 24, LostEffect.RERUN),
        (RECONCILED, 1, LostEffect.RECONCILE),
        (UNSAFE, 1, LostEffect.INTERRUPT),
    ],
)
def test_each_safety_has_its_attempts_and_its_way_after_a_lost_worker(
    safety: ReplaySafety, attempts: int, lost: LostEffect
) -> None:
    assert retry_plan(safety).attempts_max == attempts
    assert after_lost_effect(safety) is lost


def test_only_what_may_be_rerun_is_retried_by_temporal() -> None:
    for safety in ReplaySafety:
        retried = retry_plan(safety).attempts_max != 1
        assert retried == (after_lost_effect(safety) is LostEffect.RERUN)


@pytest.mark.parametrize(("one", "other"), [*itertools.product(ReplaySafety, repeat=2)])
def test_the_stricter_of_two_is_the_later_in_the_order(
    one: ReplaySafety, other: ReplaySafety
) -> None:
    order = [SAFE, KEYED, RECONCILED, UNSAFE]

    assert stricter(one, other) is order[max(order.index(one), order.index(other))]


def test_strictness_is_the_same_in_either_order_and_asks_nothing_of_itself() -> None:
    for one, other in itertools.product(ReplaySafety, repeat=2):
        assert stricter(one, other) is stricter(other, one)
        assert stricter(one, one) is one


@pytest.mark.parametrize("plan", [ONE_ATTEMPT, REPEATED, FOR_EVER])
def test_bugs_and_refused_payloads_are_never_retried(plan: RetryPlan) -> None:
    assert set(plan.never_retried) >= {"AssertionError", "PayloadsTooLarge"}


def test_lost_workers_do_not_eat_the_tries_of_the_ledger() -> None:
    assert TOOL_ERROR_TRIES == 4
    assert TEMPORAL_ATTEMPTS_MAX == 24
    assert FOR_EVER.attempts_max == 0
    assert RESCHEDULE_DELAYS_S == (1.0, 5.0, 25.0)


@pytest.mark.parametrize(
    ("errors", "seconds"),
    [(0, 2), (1, 2), (2, 4), (3, 8), (4, 16), (5, 32), (6, 60), (7, 60), (10_000, 60)],
)
def test_the_wait_after_reported_errors_doubles_up_to_a_minute(errors: int, seconds: float) -> None:
    assert backoff_s(errors) == seconds
