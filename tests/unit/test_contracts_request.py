"""The one way in: what a caller may send, how it is refused, and that refusals repeat no input."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contracts.canonical import encoded_bytes
from perdure.contracts.errors import (
    InvalidIdentifier,
    InvalidRequest,
    MessageBlank,
    MessageTooLarge,
)
from perdure.contracts.limits import ERROR_CHARS_MAX, MESSAGE_BYTES_MAX, TOOLS_PER_TURN_MAX
from perdure.contracts.messages import Role, TextPart
from perdure.contracts.turn import TurnRequest, parse_turn_request

CANARY = "CANARY7f3"


def request(**changes: Any) -> dict[str, Any]:
    """A valid input with changes."""
    base = {"agent": "desk", "conversation_id": "c-1", "request_id": "r-1", "message": "Hello"}
    return base | changes


def without(field: str) -> dict[str, Any]:
    """A valid input that lacks one field."""
    return {name: value for name, value in request().items() if name != field}


def refusal(value: Any) -> InvalidRequest:
    """The error with which the input is refused."""
    with pytest.raises(InvalidRequest) as caught:
        parse_turn_request(value)
    return caught.value


def room_for(escaped: int) -> int:
    """How many characters of so many encoded bytes each fit into a message of one part."""
    empty = parse_turn_request(request(message="x")).message.model_dump(mode="json")
    return (MESSAGE_BYTES_MAX - encoded_bytes(empty) + 1) // escaped


def test_the_least_input_gets_the_defaults() -> None:
    parsed = parse_turn_request(request())

    assert parsed.namespace == "default"
    assert parsed.tools is None
    assert parsed.limits.model_steps_max == 64
    assert parsed.message.role is Role.USER
    assert parsed.message.parts == (TextPart(text="Hello"),)


def test_the_whole_input_is_read() -> None:
    message = {"role": "user", "parts": [{"type": "text", "text": "a"}, {"text": "b"}]}
    parsed = parse_turn_request(
        request(
            namespace="tenant.user",
            message=message,
            tools=["b", "a"],
            limits={"model_steps_max": 3},
        )
    )

    assert parsed.message.text == "ab"
    assert len(parsed.message.parts) == 2
    assert parsed.tools == ("a", "b")
    assert parsed.limits.model_steps_max == 3
    assert parsed.key.turn_id.startswith("turn_")


def test_a_parsed_request_passes_unchanged() -> None:
    parsed = parse_turn_request(request())

    assert parse_turn_request(parsed) is parsed


def test_a_request_survives_being_sent_as_json_without_defaults() -> None:
    parsed = parse_turn_request(request(tools=["a"], limits={"model_steps_max": 2}))
    sent = json.loads(json.dumps(parsed.model_dump(mode="json", exclude_defaults=True)))

    assert parse_turn_request(sent) == parsed
    assert parse_turn_request(sent).digest == parsed.digest


@pytest.mark.parametrize("value", [None, True, 3, 1.5, CANARY, [CANARY], [], [request()]])
def test_an_input_that_is_no_object_is_refused(value: Any) -> None:
    assert str(refusal(value)).startswith("the input must be a JSON object, not ")


@pytest.mark.parametrize("field", ["agent", "conversation_id", "request_id", "message"])
def test_a_missing_field_is_named(field: str) -> None:
    error = refusal(without(field))

    assert type(error) is InvalidRequest
    assert str(error) == f"{field}: Field required"


@pytest.mark.parametrize("field", ["agent", "conversation_id", "request_id", "namespace"])
@pytest.mark.parametrize(
    "value", ["", "a b", f"{CANARY}/x", f"{CANARY}\n", "x" * 129, f"é{CANARY}", f"{CANARY}\x00"]
)
def test_a_bad_id_is_refused_by_name(field: str, value: str) -> None:
    error = refusal(request(**{field: value}))

    assert type(error) is InvalidIdentifier
    assert str(error).startswith(f"{field}: must be 1 to 128 of ")
    assert CANARY not in str(error)


@pytest.mark.parametrize(
    "message", ["", " ", "\n\t \r\n", "\u3000\u2003", {"parts": [{"text": " "}]}]
)
def test_a_blank_message_is_refused(message: Any) -> None:
    assert type(refusal(request(message=message))) is MessageBlank


@pytest.mark.parametrize(
    ("character", "escaped"), [("x", 1), ("\n", 2), ("\x00", 6), ("ü", 6), ("😀", 12)]
)
def test_the_bound_of_a_message_counts_encoded_bytes(character: str, escaped: int) -> None:
    # The first and last character are plain, so that none of these is blank.
    fits = room_for(escaped) - 1
    accepted = parse_turn_request(request(message="x" + character * (fits - 1)))

    error = refusal(request(message="x" + character * (fits + 2)))

    assert encoded_bytes(accepted.message.model_dump(mode="json")) <= MESSAGE_BYTES_MAX
    assert type(error) is MessageTooLarge
    assert f"at most {MESSAGE_BYTES_MAX} fit" in str(error)


def test_many_parts_that_are_too_large_together_are_refused() -> None:
    parts = [{"text": "x" * 2000} for _ in range(200)]

    assert type(refusal(request(message={"parts": parts}))) is MessageTooLarge


@pytest.mark.parametrize(
    "changes",
    [
        {"surprise": CANARY},
        {CANARY: 1},
        {"stream": True, CANARY: CANARY},
        {"message": {"parts": [{"text": "a"}], CANARY: 1}},
        {"message": {"parts": [{"text": "a", CANARY: 1}]}},
        {"limits": {CANARY: 1}},
        {"epoch": 3},
        {"opening": {}},
    ],
)
def test_unknown_fields_are_refused_and_the_known_ones_listed(changes: dict[str, Any]) -> None:
    error = refusal(request(**changes))

    assert type(error) is InvalidRequest
    assert "unknown field(s)" in str(error)
    assert "conversation_id" in str(error)
    assert CANARY not in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("message", None),
        ("message", 5),
        ("message", [CANARY]),
        ("message", {}),
        ("message", {"parts": []}),
        ("message", {"parts": CANARY}),
        ("message", {"parts": [CANARY]}),
        ("message", {"parts": [{"type": CANARY, "text": "a"}]}),
        ("message", {"parts": [{"type": "tool_call", "text": CANARY}]}),
        ("message", {"parts": [{"text": {"deep": CANARY}}]}),
        ("message", {"parts": [{"text": 5}]}),
        ("message", {"parts": [{"text": "a"}] * 257}),
        ("message", {"role": "system", "parts": [{"text": CANARY}]}),
        ("message", {"role": CANARY, "parts": [{"text": "a"}]}),
        ("tools", CANARY),
        ("tools", {CANARY: 1}),
        ("tools", [f"{CANARY}.x"]),
        ("tools", [""]),
        ("tools", [None]),
        ("tools", ["a"] * (TOOLS_PER_TURN_MAX + 1)),
        ("limits", None),
        ("limits", CANARY),
        ("limits", {"model_steps_max": CANARY}),
        ("limits", {"model_steps_max": "3"}),
        ("limits", {"model_steps_max": 0}),
        ("limits", {"model_steps_max": 1001}),
        ("limits", {"model_steps_max": True}),
        ("limits", {"model_steps_max": 1.5}),
        ("limits", {"model_steps_max": 10**400}),
        ("agent", None),
        ("agent", 7),
        ("conversation_id", [CANARY]),
        ("namespace", None),
        ("request_id", {CANARY: CANARY}),
    ],
)
def test_a_bad_value_is_refused_under_the_name_of_its_field(field: str, value: Any) -> None:
    error = refusal(request(**{field: value}))

    assert not error.retryable
    assert str(error).startswith(f"{field}: ")
    assert len(str(error)) <= ERROR_CHARS_MAX
    assert CANARY not in str(error)


def test_keys_that_are_no_text_are_refused() -> None:
    assert isinstance(refusal({**request(), 1: CANARY}), InvalidRequest)


def test_a_value_nested_without_end_is_refused() -> None:
    deep: Any = CANARY
    for _ in range(100_000):
        deep = [deep]

    error = refusal(request(message=deep))

    assert CANARY not in str(error)


def test_a_refusal_does_not_drag_the_input_along() -> None:
    error = refusal(request(agent=f"{CANARY} x"))

    # Temporal and logging write the cause of an error as well.
    assert error.__cause__ is None
    assert error.__suppress_context__


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.just(CANARY),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["parts", "text", "type", "role", CANARY]), inner)
        ),
        max_leaves=8,
    ),
    st.sampled_from(["message", "tools", "limits", "agent", "namespace", "new"]),
)
def test_no_refusal_repeats_what_was_sent(value: Any, field: str) -> None:
    said = ""
    try:
        parse_turn_request(request(**{field: value}))
    except InvalidRequest as error:
        said = str(error)

    assert CANARY not in said


def digest(**changes: Any) -> str:
    """The digest of a valid input with changes."""
    return parse_turn_request(request(**changes)).digest


def test_the_digest_is_pinned() -> None:
    # A change here would turn every retry over a deploy into a conflict.
    expected = "82099d6d94083ba8c804be2ef408c9eb70cbf1fb4e7430a4abf9e4f665440ab0"

    assert digest() == f"sha256:{expected}"


def test_a_string_and_its_message_object_are_the_same_content() -> None:
    assert digest(message="Hello") == digest(message={"parts": [{"text": "Hello"}]})
    whole = {"role": "user", "parts": [{"type": "text", "text": "Hello"}]}
    assert digest(message="Hello") == digest(message=whole)


def test_defaults_said_aloud_are_the_same_content() -> None:
    said = digest(namespace="default", tools=None, limits={"model_steps_max": 64})

    assert said == digest() == digest(limits={})


def test_tools_are_a_set() -> None:
    assert digest(tools=["b", "a", "b"]) == digest(tools=["a", "b"])
    assert digest(tools=[]) != digest(tools=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": "other"},
        {"namespace": "other"},
        {"conversation_id": "other"},
        {"request_id": "other"},
        {"message": "Hello "},
        {"message": {"parts": [{"text": "Hel"}, {"text": "lo"}]}},
        {"tools": ["a"]},
        {"limits": {"model_steps_max": 63}},
    ],
)
def test_other_content_has_another_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


@given(st.permutations(list(request(namespace="n", tools=["a"], limits={}).items())))
def test_the_order_of_fields_does_not_matter(items: list[tuple[str, Any]]) -> None:
    expected = parse_turn_request(request(namespace="n", tools=["a"]))

    assert parse_turn_request(dict(items)).digest == expected.digest


def test_a_message_of_half_characters_has_a_digest() -> None:
    assert TurnRequest.model_validate(request(message="a\ud800")).digest.startswith("sha256:")
