"""Whatever a tool returns, the model is told and the ledger can keep it (promise P12)."""

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from perdure import errors
from perdure.activities.results import outcome_of, outcome_of_error
from perdure.contracts.limits import (
    TOOL_RESULT_BYTES_MAX,
    TOOL_TEXT_BYTES_MAX,
    TOOL_TEXT_LINES_MAX,
)
from perdure.contracts.tools import ResultStatus


class Receipt(BaseModel):
    """A result an author would return."""

    order: int
    at: datetime.datetime


class Odd:
    """No JSON, and no text either."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("value", "text", "flags"),
    [
        ("plain", "plain", ()),
        ({"a": [1, None, True]}, '{"a":[1,null,true]}', ()),
        (2**70, str(2**70), ()),
        (MOMENT, '"2026-01-02T03:04:05Z"', ("not_json",)),
        (decimal.Decimal("1.10"), '"1.10"', ("not_json",)),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"', ("not_json",)),
        (b"bytes", '"bytes"', ("not_json",)),
        (b"\xff\xfe", '"//4="', ("not_json",)),
        ({3, 1, 2}, "[1,2,3]", ("not_json",)),
        (math.nan, '"NaN"', ("not_json",)),
        (-math.inf, '"-Infinity"', ("not_json",)),
        ("a\x00b", "a\u2400b", ("sanitised",)),
        ("a\ud800b", "a\ufffdb", ("sanitised",)),
        ({1: "x"}, '{"1":"x"}', ("not_json",)),
        (Odd(), '"<Odd>"', ("not_json",)),
    ],
)
def test_every_kind_of_result_is_kept_with_a_flag(
    value: Any, text: str, flags: tuple[str, ...]
) -> None:
    outcome = outcome_of(value)

    assert (outcome.status, outcome.text, outcome.flags) == (ResultStatus.OK, text, flags)


def test_a_model_is_kept_as_its_json() -> None:
    outcome = outcome_of(Receipt(order=1, at=MOMENT))

    assert json.loads(outcome.text) == {"order": 1, "at": "2026-01-02T03:04:05Z"}


def test_three_megabytes_are_cut_for_the_model_and_kept_whole() -> None:
    text = "x" * 3_000_000

    outcome = outcome_of(text)

    assert len(outcome.text.encode()) < TOOL_TEXT_BYTES_MAX + 100
    assert outcome.flags == ("cut",)
    assert outcome.full == text


def test_too_many_lines_are_cut_at_a_line() -> None:
    outcome = outcome_of("line\n" * (TOOL_TEXT_LINES_MAX + 10))

    assert outcome.text.count("line") == TOOL_TEXT_LINES_MAX
    assert "cut" in outcome.flags


def test_a_value_that_contains_itself_is_described() -> None:
    value: list[Any] = []
    value.append(value)

    assert outcome_of(value).flags == ("not_json",)


def test_an_unsafe_error_says_that_it_may_have_taken_effect() -> None:
    error = errors.ToolError("no such order")

    assert outcome_of_error(error, may_have_happened=False).text == "error: no such order"
    assert "may or may not" in outcome_of_error(error, may_have_happened=True).text


class Closed(Mapping[str, int]):
    """Breaks when somebody looks into it."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("closed")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("closed")

    def __len__(self) -> int:
        return 1


class Slots(list[int]):
    """Breaks when it is walked through."""

    def __iter__(self) -> Iterator[int]:
        raise OSError("gone")


def breaking() -> Iterator[int]:
    """Breaks half way."""
    yield 1
    raise KeyError("gone")


@pytest.mark.parametrize(
    "value",
    [Closed(), {"row": Closed()}, [Slots([1])], breaking(), Odd, object(), {"x": Odd()}],
    ids=["mapping", "in an object", "list", "generator", "class", "object", "no text"],
)
def test_a_value_that_breaks_when_it_is_looked_at_is_described(value: Any) -> None:
    outcome = outcome_of(value)

    assert (outcome.status, outcome.flags) == (ResultStatus.OK, ("not_json",))
    assert outcome.text


def test_an_exception_that_cannot_be_shown_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    outcome = outcome_of_error(Mute(), may_have_happened=False)

    assert outcome.text == "error: Mute: <Mute>"


def test_what_a_tool_reports_reaches_the_model_whole() -> None:
    outcome = outcome_of_error(errors.ToolError("x" * 1000), may_have_happened=False)

    assert outcome.text == "error: " + "x" * 1000


def test_an_error_is_sanitised_and_cut_like_a_result() -> None:
    outcome = outcome_of_error(ValueError("\ud800" + "x" * 100_000), may_have_happened=True)

    assert outcome.flags == ("cut", "sanitised")
    assert outcome.full is not None
    assert outcome.full.endswith("may or may not have taken effect.")


def test_what_no_ledger_keeps_is_dropped_with_a_flag() -> None:
    outcome = outcome_of("é" * TOOL_RESULT_BYTES_MAX)

    assert outcome.flags == ("cut", "dropped")
    assert outcome.full is not None
    assert len(outcome.full.encode()) <= TOOL_RESULT_BYTES_MAX


def test_a_text_of_exactly_the_bound_is_not_cut() -> None:
    fits, larger = (
        outcome_of("x" * TOOL_TEXT_BYTES_MAX),
        outcome_of("x" * TOOL_TEXT_BYTES_MAX + "y"),
    )

    assert (fits.flags, larger.flags) == ((), ("cut",))


@pytest.mark.parametrize("depth", [50, 5000])
def test_what_is_nested_too_deep_is_described(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]

    outcome = outcome_of(value)

    assert outcome.flags == (() if depth == 50 else ("not_json",))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.datetimes()
    | st.decimals()
    | st.uuids(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(ANYTHING)
def test_no_value_makes_a_result_that_cannot_be_stored(value: Any) -> None:
    outcome = outcome_of(value)

    assert "\x00" not in outcome.text
    outcome.text.encode()
    json.dumps(outcome.model_dump(mode="json"), allow_nan=False)


def test_keys_that_are_one_key_in_json_lose_nothing() -> None:
    outcome = outcome_of({1: "a", "1": "b"})

    assert (outcome.status, outcome.flags) == (ResultStatus.OK, ("not_json",))
    assert "'a'" in outcome.text
    assert "'b'" in outcome.text
