"""Cutting an answer to the bytes a result may hold."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contracts.limits import ANSWER_IN_RESULT_BYTES_MAX
from perdure.contracts.turn import StopReason, TurnResult, TurnStatus, cut_text

TEXTS = st.text(st.characters(exclude_categories=()) | st.sampled_from("a\n\x00ü😀\ud800"))


@given(TEXTS, st.integers(2, 200))
def test_a_cut_text_is_the_longest_head_that_fits(text: str, bytes_max: int) -> None:
    head, cut = cut_text(text, bytes_max)

    assert text.startswith(head)
    assert cut == (head != text)
    assert len(json.dumps(head)) <= bytes_max
    if cut:
        assert len(json.dumps(text[: len(head) + 1])) > bytes_max


@pytest.mark.parametrize(
    ("text", "bytes_max", "expected"),
    [
        ("", 2, ("", False)),
        ("abc", 5, ("abc", False)),
        ("abc", 4, ("ab", True)),
        ("a\nb", 5, ("a\n", True)),
        ("😀😀", 14, ("😀", True)),
        ("😀", 13, ("", True)),
    ],
)
def test_bytes_are_counted_as_encoded(
    text: str, bytes_max: int, expected: tuple[str, bool]
) -> None:
    assert cut_text(text, bytes_max) == expected


def test_a_long_answer_is_cut_quickly_and_close_to_the_bound() -> None:
    head, cut = cut_text("\n" * 3_000_000, ANSWER_IN_RESULT_BYTES_MAX)

    assert cut
    assert len(json.dumps(head)) == ANSWER_IN_RESULT_BYTES_MAX


def test_a_result_survives_json_and_ignores_what_it_does_not_know() -> None:
    result = TurnResult(
        turn_id="turn_1",
        status=TurnStatus.COMPLETED,
        stop_reason=StopReason.ANSWERED,
        answer="ü",
        conversation_version=3,
    )

    sent = json.loads(result.model_dump_json()) | {"a_new_field": 1}

    assert TurnResult.model_validate(sent) == result
