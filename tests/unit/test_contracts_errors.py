"""Errors: bounded messages, stable codes, and which may be tried again."""

import pytest

from perdure.contracts.errors import (
    LedgerCorruption,
    LedgerRejection,
    ModelError,
    ModelProtocolError,
    ModelScriptError,
    ModelUnavailable,
    PerdureError,
    RequestConflict,
    StoreUnavailable,
    ToolError,
    TurnFailed,
    WrongStore,
)

LONG = "ü" * 1000


@pytest.mark.parametrize(
    "error",
    [
        PerdureError(LONG),
        RequestConflict(LONG),
        ModelUnavailable(LONG, retry_after_s=1),
        ToolError(LONG),
        LedgerRejection("reason", LONG),
        LedgerCorruption("reason", LONG),
        TurnFailed("model_failed", LONG),
    ],
)
def test_a_message_is_cut_at_300_characters(error: PerdureError) -> None:
    assert len(str(error)) == 300
    assert LONG not in repr(error)


def test_a_short_message_is_left_alone() -> None:
    assert str(RequestConflict("request r-1 has other content")) == "request r-1 has other content"


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (PerdureError("x"), False),
        (RequestConflict("x"), False),
        (LedgerCorruption("r", "x"), False),
        (StoreUnavailable("x"), True),
        (WrongStore("x"), True),
        (ToolError("x"), True),
        (ToolError("x", retryable=False), False),
        (ModelError("x"), True),
        (ModelProtocolError("x"), True),
        (ModelUnavailable("x", retryable=False), False),
        (ModelScriptError("x"), False),
        (PerdureError("x", retryable=True), True),
    ],
)
def test_an_error_says_whether_it_may_be_tried_again(error: PerdureError, retryable: bool) -> None:
    assert error.retryable is retryable


def test_a_wait_that_was_asked_for_is_kept() -> None:
    assert ToolError("busy", retry_after_s=2.5).retry_after_s == 2.5
    assert ModelUnavailable("busy", retry_after_s=7).retry_after_s == 7
    assert ModelUnavailable("busy").retry_after_s is None


def test_a_reason_is_kept_and_said() -> None:
    error = LedgerRejection("orphan_dispatch", "no call is recorded")

    assert error.reason == "orphan_dispatch"
    assert str(error) == "orphan_dispatch: no call is recorded"
    assert TurnFailed("step_limit", "64 steps").stop_reason == "step_limit"
