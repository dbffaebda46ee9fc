"""Canonical JSON, sanitised text and digests: the same content is the same bytes, always."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contracts.canonical import (
    canonical_json,
    content_digest,
    digest_parts,
    encoded_bytes,
    sanitise_text,
    sanitised,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# Text as a stranger's JSON may hold it: with NULs and halves of surrogate pairs.
ANY_TEXT = st.text(st.characters(exclude_categories=()) | st.sampled_from("\x00\ud83d\ude00a"))
U64 = st.integers(0, 2**64 - 1)


def reordered(value: Any) -> Any:
    """The same value with the keys of every object in reverse order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def keys_of(text: str) -> list[list[str]]:
    """The keys of every object of a JSON text, in the order in which they stand."""
    found: list[list[str]] = []
    json.loads(text, object_pairs_hook=lambda pairs: found.append([key for key, _ in pairs]))
    return found


@given(JSON_VALUES)
def test_canonical_json_reads_back_as_the_same_value(value: Any) -> None:
    text = canonical_json(value)

    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


@given(JSON_VALUES)
def test_canonical_json_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    assert canonical_json(reordered(value)) == canonical_json(value)


@given(st.dictionaries(st.text(), st.dictionaries(st.text(), st.none())))
def test_the_keys_of_every_object_are_sorted(value: dict[str, Any]) -> None:
    for keys in keys_of(canonical_json(value)):
        assert keys == sorted(keys)


@given(st.integers(-(10**400), 10**400))
def test_integers_of_any_size_stay_exact(value: int) -> None:
    assert canonical_json({"n": value}) == f'{{"n":{value}}}'


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_exactly_and_keep_their_sign(value: float) -> None:
    back = json.loads(canonical_json(value))

    assert back == value
    assert math.copysign(1, back) == math.copysign(1, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}'),
        ({"é": "ü", "Z": "😀"}, '{"Z":"😀","é":"ü"}'),
        ({"10": 1, "9": 2}, '{"10":1,"9":2}'),
        (0.1, "0.1"),
        (1.0, "1.0"),
        (2**53 + 1, "9007199254740993"),
        ("\x00\n", '"\\u0000\\n"'),
        ((1, 2), "[1,2]"),
    ],
)
def test_the_canonical_form_is_pinned(value: Any, text: str) -> None:
    assert canonical_json(value) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_json_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"deep": [value]})


@pytest.mark.parametrize("value", [{1: "a"}, [{None: 1}], {"a": {1.5: 1}}, {1: 1, "1": 2}])
def test_keys_that_are_no_text_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="key"):
        canonical_json(value)


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), 1j])
def test_values_that_are_not_json_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        canonical_json({"deep": [value]})


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain ü 😀", "plain ü 😀"),
        ("", ""),
        ("a\x00b", "a\u2400b"),
        ("a\ud800b", "a\ufffdb"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("end\ud83d", "end\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ude00\ud83d", "😀\ufffd"),
        ("\ufeffbom", "\ufeffbom"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
        ("\x00\ud800", "\u2400\ufffd"),
    ],
)
def test_text_that_no_database_stores_is_replaced(text: str, clean: str) -> None:
    assert sanitise_text(text) == clean


@given(ANY_TEXT)
def test_sanitised_text_can_be_stored_and_stays_as_it_is(text: str) -> None:
    clean = sanitise_text(text)

    assert clean.encode().decode() == clean
    assert "\x00" not in clean
    assert sanitise_text(clean) == clean


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert sanitise_text(text) == text


def test_values_are_sanitised_in_depth_and_in_keys() -> None:
    value = {"a\x00": ["\ud800", {"b": "c\x00"}, 1, None]}

    assert sanitised(value) == {"a\u2400": ["\ufffd", {"b": "c\u2400"}, 1, None]}


@pytest.mark.parametrize(
    ("value", "size"),
    [("a", 3), ("\n", 4), ("\x00", 8), ("ü", 8), ("😀", 14), ("\ud800", 8), ([1, 2], 5)],
)
def test_encoded_bytes_counts_every_escape(value: Any, size: int) -> None:
    assert encoded_bytes(value) == size


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_different_lists_of_texts_have_different_digests(one: list[str], other: list[str]) -> None:
    assert (digest_parts("d", one) == digest_parts("d", other)) == (one == other)


@given(st.tuples(st.text(), U64, U64), st.tuples(st.text(), U64, U64))
def test_different_numbers_have_different_digests(
    one: tuple[str, int, int], other: tuple[str, int, int]
) -> None:
    assert (digest_parts("d", one) == digest_parts("d", other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["", "a"], ["a", ""]),
        (["a"], ["a", ""]),
        (["é"], ["e\u0301"]),
        (["1"], [1]),
        ([1, 23], [12, 3]),
    ],
)
def test_a_digest_tells_where_one_part_ends(one: list[str | int], other: list[str | int]) -> None:
    assert digest_parts("d", one) != digest_parts("d", other)


def test_a_digest_tells_its_domain() -> None:
    assert digest_parts("one", ["a"]) != digest_parts("other", ["a"])
    assert digest_parts("a", []) != digest_parts("", ["a"])


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_that_does_not_fit_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        digest_parts("d", [number])


def test_digests_are_pinned() -> None:
    expected = "e5a85f1a1f50ef38af5fef4e5f017338"

    assert digest_parts("perdure.test.v1", ("a", 1, b"b"))[:32] == expected
    assert content_digest("ü\ud800").startswith("sha256:")
    assert content_digest("") == (
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
