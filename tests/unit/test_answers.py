"""From a model's response to what the ledger records; whatever is wrong with a call is told to it.

Nothing here is executed: a refused call carries its result.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Agent, ReplaySafety, ToolContext, tool
from perdure.activities.answers import check_response, plan_answer
from perdure.contracts.calls import TurnRef
from perdure.contracts.canonical import canonical_json
from perdure.contracts.errors import ModelProtocolError
from perdure.contracts.events import encode_event
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.limits import (
    ANSWER_PARTS_BYTES_MAX,
    ARGUMENTS_BYTES_MAX,
    CALLS_PER_STEP_MAX,
    NESTING_LEVELS_MAX,
)
from perdure.contracts.messages import (
    Part,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from perdure.contracts.model import FinishReason, ModelResponse, Usage
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.stores.commands import CommitAnswer, PlannedCall

REF = TurnRef(conversation_id="c", request_id="r", epoch=1)


@tool(replay=ReplaySafety.KEYED)
async def note(item: Any, ctx: ToolContext) -> str:
    """Note anything."""
    raise AssertionError("a planned call is not executed")


@tool
async def count(item: int) -> int:
    """Takes a number."""
    raise AssertionError("a planned call is not executed")


AGENT = Agent("desk", "scripted:none", tools=[note, count])


def response(*parts: Part, finish_reason: FinishReason = FinishReason.STOP) -> ModelResponse:
    """A response of these parts."""
    return ModelResponse(parts=parts, finish_reason=finish_reason)


def plan(*parts: Part, selected: tuple[str, ...] | None = None) -> CommitAnswer:
    """What is committed for an answer of these parts in step 3."""
    return plan_answer(REF, 3, 2, response(*parts), AGENT, selected)


def planned(part: ToolCallPart, selected: tuple[str, ...] | None = None) -> PlannedCall:
    """What is planned for one call."""
    (only,) = plan(part, selected=selected).calls
    return only


def refusal_of(part: ToolCallPart, selected: tuple[str, ...] | None = None) -> tuple[str, str]:
    """Why a call is refused, and the text for the model."""
    refusal = planned(part, selected).refusal
    assert refusal is not None
    assert refusal.status is ResultStatus.REFUSED
    assert refusal.reason is not None
    assert refusal.text.startswith("not executed: ")
    return refusal.reason, refusal.text


def raw(arguments: str, name: str = "note") -> ToolCallPart:
    """A call with the text of arguments that its provider sent."""
    return ToolCallPart(name=name, arguments_text=arguments)


def nested(levels: int) -> dict[str, Any]:
    """An object in an object in an object."""
    value: dict[str, Any] = {"item": 1}
    for _ in range(levels - 1):
        value = {"item": value}
    return value


def test_a_call_gets_its_derived_identity_and_the_tools_safety() -> None:
    part = ToolCallPart(name="note", provider_call_id="call_1", arguments={"item": 1})
    answer = plan(TextPart(text="one moment"), part)
    (only,) = answer.calls

    operation_id = derive_operation_id(REF.turn_id, 3, 0)
    assert (only.called.operation_id, only.called.safety) == (operation_id, ReplaySafety.KEYED)
    assert (only.called.step, only.called.index, only.called.tool) == (3, 0, "note")
    assert only.called.provider_call_id == "call_1"
    assert only.refusal is None
    assert answer.answered.parts == (
        TextPart(text="one moment"),
        part.model_copy(update={"call_id": operation_id}),
    )
    assert (answer.answered.step, answer.answered.attempt) == (3, 2)


def test_calls_are_numbered_in_order_whatever_ids_the_provider_gave() -> None:
    calls = [ToolCallPart(name="note", provider_call_id="x", arguments={"item": n}) for n in (0, 1)]
    answer = plan(calls[0], TextPart(text="and"), calls[1])

    assert [one.called.index for one in answer.calls] == [0, 1]
    assert len({one.called.operation_id for one in answer.calls}) == 2


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    only = planned(raw(text, "count"))

    assert only.called.arguments == {}
    assert "item" in (only.refusal.text if only.refusal is not None else "")


def test_arguments_that_were_sent_as_text_are_stored_as_an_object_alone() -> None:
    answer = plan(raw('{"item": [1, {"a": "é"}]}'))

    part = answer.answered.parts[0]
    assert isinstance(part, ToolCallPart)
    assert (part.arguments, part.arguments_text) == ({"item": [1, {"a": "é"}]}, None)
    assert answer.calls[0].called.arguments == part.arguments


@pytest.mark.parametrize("text", ["{", "item", "{'item': 1}", '{"item": 1,}', "\x00", "[" * 9999])
def test_malformed_arguments_are_kept_as_text_and_refused(text: str) -> None:
    reason, told = refusal_of(raw(text))

    assert reason == ResultReason.INVALID_ARGUMENTS
    assert "valid JSON" in told
    part = plan(raw(text)).answered.parts[0]
    assert isinstance(part, ToolCallPart)
    assert (part.arguments, part.arguments_text) == ({}, text)


@pytest.mark.parametrize("text", ["[]", '"x"', "7", "null", "true"])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    reason, told = refusal_of(raw(text))

    assert reason == ResultReason.INVALID_ARGUMENTS
    assert "no JSON object" in told


@pytest.mark.parametrize("text", ['{"item": NaN}', '{"item": Infinity}', '{"item": 1e999}'])
def test_numbers_that_json_does_not_have_are_refused(text: str) -> None:
    assert refusal_of(raw(text))[0] == ResultReason.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), b"\xff", 10**5000, {1: 2}],
    ids=["set", "object", "bytes", "digits", "key"],
)
def test_values_that_are_no_json_are_refused(value: Any) -> None:
    part = ToolCallPart.model_construct(name="note", arguments={"item": value})

    assert refusal_of(part)[0] == ResultReason.INVALID_ARGUMENTS


def test_a_hundred_levels_may_lie_in_the_arguments_and_no_more() -> None:
    fits = ToolCallPart(name="note", arguments=nested(1 + NESTING_LEVELS_MAX))
    deeper = ToolCallPart(name="note", arguments=nested(2 + NESTING_LEVELS_MAX))

    assert planned(fits).refusal is None
    assert refusal_of(deeper)[0] == ResultReason.INVALID_ARGUMENTS
    assert refusal_of(raw('{"item":' * 900 + "1" + "}" * 900))[0] == ResultReason.INVALID_ARGUMENTS


def test_arguments_may_have_their_bound_of_bytes_and_no_more() -> None:
    room = ARGUMENTS_BYTES_MAX - len(canonical_json({"item": ""}))
    fits = ToolCallPart(name="note", arguments={"item": "x" * room})
    larger = ToolCallPart(name="note", arguments={"item": "x" * (room + 1)})

    assert planned(fits).refusal is None
    assert refusal_of(larger)[0] == ResultReason.INVALID_ARGUMENTS
    assert planned(larger).called.arguments == {}


def test_whole_numbers_of_any_size_are_kept_exactly() -> None:
    only = planned(raw('{"item": 9007199254740993}'))

    assert only.called.arguments == {"item": 2**53 + 1}


def test_text_that_no_database_holds_is_replaced_before_the_tool_sees_it() -> None:
    only = planned(raw('{"item": "a\\ud800\\u0000b"}'))

    assert only.called.arguments == {"item": "a�␀b"}
    assert only.refusal is None


@pytest.mark.parametrize("name", ["sudo", "", "note ", "NOTE", "no such/tool", "\ud800", "t" * 300])
def test_an_unknown_tool_is_refused_with_the_ones_there_are(name: str) -> None:
    reason, told = refusal_of(ToolCallPart(name=name, arguments={}))

    assert reason == ResultReason.UNKNOWN_TOOL
    assert told.endswith("The tools are: note, count.")
    assert planned(ToolCallPart(name=name)).called.safety is ReplaySafety.UNSAFE


def test_an_unknown_tool_is_the_reason_even_where_its_arguments_are_malformed() -> None:
    assert refusal_of(raw("{", "sudo"))[0] == ResultReason.UNKNOWN_TOOL


def test_a_tool_outside_the_turns_selection_is_refused() -> None:
    part = ToolCallPart(name="count", arguments={"item": 1})

    assert refusal_of(part, ("note",))[0] == ResultReason.CAPABILITY_DENIED
    assert planned(part, ("count",)).refusal is None


def test_what_is_unknown_is_not_told_of_tools_outside_the_selection() -> None:
    _, told = refusal_of(ToolCallPart(name="sudo"), ("note",))

    assert told.endswith("The tools are: note.")


@pytest.mark.parametrize("arguments", [{}, {"item": "x"}, {"item": 1, "more": 2}])
def test_arguments_that_do_not_fit_the_tool_are_refused(arguments: dict[str, Any]) -> None:
    part = ToolCallPart(name="count", arguments=arguments)

    assert refusal_of(part)[0] == ResultReason.INVALID_ARGUMENTS


def test_a_call_beyond_the_bound_is_refused_whatever_it_is() -> None:
    many = [ToolCallPart(name="note", arguments={"item": 1})] * (CALLS_PER_STEP_MAX + 2)
    calls = plan(*many).calls

    reasons = [one.refusal.reason if one.refusal is not None else None for one in calls]
    assert reasons == [None] * CALLS_PER_STEP_MAX + [ResultReason.TOO_MANY_CALLS] * 2


def test_empty_texts_are_left_out_and_thinking_is_kept_with_its_data() -> None:
    thinking = ThinkingPart(provider_data={"signature": "abc"})
    answer = plan(thinking, TextPart(text=""), TextPart(text="yes"))

    assert answer.answered.parts == (thinking, TextPart(text="yes"))


def test_calls_that_are_announced_must_be_there() -> None:
    with pytest.raises(ModelProtocolError) as caught:
        check_response(response(finish_reason=FinishReason.TOOL_CALLS))

    assert caught.value.retryable


def test_a_response_must_not_contain_results() -> None:
    with pytest.raises(ModelProtocolError):
        check_response(response(ToolResultPart(call_id="x", name="note", text="forged")))


@pytest.mark.parametrize("poison", [object(), b"\xff", {1}, float("inf"), {1: 2}, nested(200)])
def test_provider_data_must_be_json_that_can_be_sent_back(poison: Any) -> None:
    for part in (
        ThinkingPart(provider_data={"opaque": poison}),
        ToolCallPart(name="note", provider_data={"opaque": poison}),
    ):
        with pytest.raises(ModelProtocolError):
            check_response(response(part))


def test_a_response_larger_than_any_answer_is_refused_for_good() -> None:
    half = "x" * (ANSWER_PARTS_BYTES_MAX // 2)
    with pytest.raises(ModelProtocolError) as caught:
        check_response(response(TextPart(text=half), raw(half)))

    assert not caught.value.retryable


TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(
    ToolCallPart,
    name=st.sampled_from(["note", "count", "sudo"]) | TEXT,
    provider_call_id=TEXT,
    arguments=st.dictionaries(st.sampled_from(["item", "more"]) | TEXT, JSON, max_size=3),
    arguments_text=st.none() | TEXT | JSON.map(json.dumps),
)
PARTS = CALLS | st.builds(TextPart, text=TEXT) | st.builds(ThinkingPart, text=TEXT)


@given(st.lists(PARTS, max_size=6))
def test_every_answer_can_be_stored_and_sent_back(parts: list[Part]) -> None:
    asked = [part for part in parts if isinstance(part, ToolCallPart)]
    answer = plan(*parts)

    assert answer.answered.usage == Usage()
    for event in (answer.answered, *(one.called for one in answer.calls)):
        encode_event(event).encode()
    assert len(answer.calls) == len(asked)
    stored = [part for part in answer.answered.parts if isinstance(part, ToolCallPart)]
    assert [part.call_id for part in stored] == [one.called.operation_id for one in answer.calls]
    for part, one in zip(stored, answer.calls, strict=True):
        assert part.arguments == one.called.arguments
        canonical_json(part.arguments).encode()
        if one.refusal is None:
            found = AGENT.tool(part.name)
            assert found is not None
            found.validate_arguments(part.arguments)
