"""Ledger events: they come back as they went in, as canonical bytes, in a chain that is tight."""

import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contracts import events
from perdure.contracts.canonical import canonical_json
from perdure.contracts.events import (
    Decision,
    LedgerEvent,
    ModelAnswered,
    ModelPrepared,
    Observation,
    OutputRefused,
    ReconcileReported,
    RecoveryDecided,
    ToolCalled,
    ToolDispatched,
    ToolSettled,
    TurnEnded,
    UserMessageRecorded,
    chain_digest,
    decode_event,
    encode_event,
)
from perdure.contracts.messages import TextPart, ThinkingPart, ToolCallPart, user_message
from perdure.contracts.model import FinishReason, Usage
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.contracts.turn import TurnLimits, TurnStatus

TURN: dict[str, Any] = {
    "id": "e-1", "namespace": "default", "conversation_id": "c-1", "turn_id": "turn_1",
}  # fmt: skip
CALL: dict[str, Any] = TURN | {
    "step": 1, "index": 0, "operation_id": "toolop_1", "tool": "refund",
}  # fmt: skip


def called(arguments: dict[str, Any]) -> ToolCalled:
    """A call with these arguments."""
    return ToolCalled(
        **CALL, arguments=arguments, arguments_digest="sha256:1", safety=ReplaySafety.SAFE
    )


EVENTS: tuple[LedgerEvent, ...] = (
    UserMessageRecorded(
        **TURN,
        agent="desk",
        request_id="r-1",
        request_digest="sha256:1",
        message=user_message("Grüße 😀\n"),
        tools=("a", "b"),
        limits=TurnLimits(model_steps_max=3),
        expected_version=4,
    ),
    ModelPrepared(
        **TURN,
        step=2,
        prepared=1,
        model="scripted:x",
        parameters={"temperature": 0.1, "n": 2**70},
        instructions_digest="sha256:1",
        tools_digest="sha256:2",
        window_from=1,
        window_through=4,
        events_through=7,
    ),
    ModelAnswered(
        **TURN,
        step=1,
        attempt=2,
        model="m",
        parts=(
            ThinkingPart(text="hm", provider_data={"signature": "x"}),
            TextPart(text="ok"),
            ToolCallPart(name="refund", provider_call_id="1", arguments={"order": 2}),
            ToolCallPart(name="refund", arguments_text="[1"),
        ),
        finish_reason=FinishReason.TOOL_CALLS,
        usage=Usage(input_tokens=1, output_tokens=2),
    ),
    OutputRefused(**TURN, step=1, text="it does not fit"),
    called({"order": 2, "cents": 10**30, "rate": 0.1, "deep": {"b": [None, True], "a": "ü"}}),
    ToolDispatched(**CALL, arguments_digest="sha256:1", safety=ReplaySafety.UNSAFE),
    ToolSettled(
        **CALL,
        status=ResultStatus.INTERRUPTED,
        reason=ResultReason.WORKER_LOST,
        text="It may have taken effect.",
        flags=("cut", "sanitised"),
        full_digest="sha256:3",
        generation=2,
    ),
    ReconcileReported(
        **TURN, operation_id="toolop_1", generation=1, observation=Observation.NOT_EXECUTED
    ),
    RecoveryDecided(**TURN, operation_id="toolop_1", generation=1, decision=Decision.PARKED),
    TurnEnded(
        **TURN,
        status=TurnStatus.FAILED,
        stop_reason="model_failed",
        detail="4 tries",
        answer_step=3,
        usage=Usage(cached_tokens=3),
        conversation_version=5,
        unclosed=("toolop_1",),
    ),
)


def by_kind(event: LedgerEvent) -> str:
    """A test's id."""
    return event.kind


def test_there_is_an_example_of_every_kind_of_event() -> None:
    union = get_args(get_args(LedgerEvent)[0])

    assert {type(event) for event in EVENTS} == set(union)
    assert len({event.kind for event in EVENTS}) == len(union)


@pytest.mark.parametrize("event", EVENTS, ids=by_kind)
def test_an_event_comes_back_as_it_was_written(event: LedgerEvent) -> None:
    payload = encode_event(event)

    assert decode_event(payload) == event
    assert type(decode_event(payload)) is type(event)
    assert encode_event(decode_event(payload)) == payload


@pytest.mark.parametrize("event", EVENTS, ids=by_kind)
def test_the_bytes_of_an_event_are_canonical(event: LedgerEvent) -> None:
    payload = encode_event(event)

    assert canonical_json(json.loads(payload)) == payload
    assert json.loads(payload)["kind"] == event.kind


@pytest.mark.parametrize("event", EVENTS, ids=by_kind)
def test_an_older_program_reads_an_event_with_a_field_it_does_not_know(event: LedgerEvent) -> None:
    newer = json.dumps(json.loads(encode_event(event)) | {"a_new_field": {"x": 1}})

    assert decode_event(newer) == event


@pytest.mark.parametrize("event", EVENTS, ids=by_kind)
def test_an_event_cannot_be_changed(event: LedgerEvent) -> None:
    with pytest.raises(ValueError, match="frozen"):
        event.turn_id = "turn_2"  # type: ignore[misc]


@pytest.mark.parametrize(
    "payload", ["", "null", "[]", "{}", '{"kind":"other"}', '{"kind":"turn_ended"}', "{"]
)
def test_what_is_no_event_is_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode_event(payload)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
        st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    )
)
def test_arguments_come_back_exactly(arguments: dict[str, Any]) -> None:
    back = decode_event(encode_event(called(arguments)))

    assert isinstance(back, ToolCalled)
    assert canonical_json(back.arguments) == canonical_json(arguments)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_json_are_refused_not_changed(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_event(called({"deep": [number]}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_event(EVENTS[2].model_copy(update={"parts": (_call_part(number),)}))


def _call_part(number: float) -> ToolCallPart:
    return ToolCallPart(name="refund", arguments={"n": number})


@pytest.mark.parametrize(
    ("text", "stored"),
    [("a\x00", "a\u2400"), ("a\ud800", "a\ufffd"), ("\\u0000", "\\u0000"), ("ü😀", "ü😀")],
)
def test_text_that_no_database_holds_is_replaced_when_it_is_written(text: str, stored: str) -> None:
    payload = encode_event(called({text: [text]}))
    back = decode_event(payload)

    assert payload.encode()
    assert isinstance(back, ToolCalled)
    assert back.arguments == {stored: [stored]}


def test_the_chain_is_pinned() -> None:
    first = chain_digest("", "turn_1", 1, '{"a":1}')
    second = chain_digest(first, "turn_1", 2, "{}")

    assert first == "083787d6f6dee5bd415d0fc189d884d365b0321e32c3cedf4d7edfcc79184921"
    assert second == "0dbc89520ddea92751aef029bd3ae29a4987cc6a574531bcc0b12570f8ea5474"


def test_the_chain_covers_the_predecessor_the_turn_the_place_and_the_payload() -> None:
    digests = {
        chain_digest("", "turn_1", 1, "{}"),
        chain_digest("x", "turn_1", 1, "{}"),
        chain_digest("", "turn_2", 1, "{}"),
        chain_digest("", "turn_1", 2, "{}"),
        chain_digest("", "turn_1", 1, "{ }"),
    }

    assert len(digests) == 5


def test_a_changed_event_changes_every_later_digest() -> None:
    payloads = [encode_event(event) for event in EVENTS]

    honest = _chain(payloads)
    forged = _chain([payloads[0], payloads[1].replace("scripted", "Scripted"), *payloads[2:]])

    assert honest[0] == forged[0]
    assert not set(honest[1:]) & set(forged)


def _chain(payloads: list[str]) -> list[str]:
    digests: list[str] = []
    for seq, payload in enumerate(payloads, 1):
        digests.append(chain_digest(digests[-1] if digests else "", "turn_1", seq, payload))
    return digests


def test_ids_of_events_derive_from_their_subject_and_differ() -> None:
    ids = [
        events.user_event_id("turn_1"),
        events.prepared_event_id("turn_1", 1, 1),
        events.prepared_event_id("turn_1", 1, 2),
        events.prepared_event_id("turn_1", 11, 1),
        events.prepared_event_id("turn_1", 1, 11),
        events.answered_event_id("turn_1", 1),
        events.answered_event_id("turn_1", 11),
        events.called_event_id("toolop_1"),
        events.dispatched_event_id("toolop_1"),
        events.settled_event_id("toolop_1"),
        events.ended_event_id("turn_1"),
    ]

    assert len(set(ids)) == len(ids)
    assert events.prepared_event_id("turn_1", 2, 3) == "turn_1.step2.prepared3"
    assert events.settled_event_id("toolop_1") == "toolop_1_outcome"
