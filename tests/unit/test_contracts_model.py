"""Streams into responses: the final event is needed, parts keep their order, calls are not lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contracts.errors import ModelProtocolError
from perdure.contracts.messages import Part, TextPart, ThinkingPart, ToolCallPart
from perdure.contracts.model import (
    ContentPartCompleted,
    FinishReason,
    ModelResponse,
    ResponseCompleted,
    ResponseStarted,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    Usage,
    assemble,
)

STOP = ResponseCompleted(finish_reason=FinishReason.STOP)
CALLS = ResponseCompleted(finish_reason=FinishReason.TOOL_CALLS)


def call(name: str = "refund", call_id: str = "") -> ToolCallPart:
    """A call as a provider sends it."""
    return ToolCallPart(name=name, provider_call_id=call_id)


def whole(index: int, part: Part) -> ContentPartCompleted:
    """A whole part of a stream."""
    return ContentPartCompleted(index=index, part=part)


def test_deltas_become_one_text_part() -> None:
    response = assemble([ResponseStarted(), TextDelta(text="Hel"), TextDelta(text="lo"), STOP])

    assert response.parts == (TextPart(text="Hello"),)
    assert response.finish_reason is FinishReason.STOP


@given(st.lists(st.text()))
def test_no_delta_is_lost(deltas: list[str]) -> None:
    response = assemble([*(TextDelta(text=delta) for delta in deltas), STOP])

    assert "".join(part.text for part in response.parts if isinstance(part, TextPart)) == (
        "".join(deltas)
    )


def test_a_whole_part_replaces_its_deltas() -> None:
    events = [TextDelta(text="Hel"), whole(0, TextPart(text="Hello.")), STOP]

    assert assemble(events).parts == (TextPart(text="Hello."),)


def test_parts_stand_by_index_however_they_arrive() -> None:
    events = [whole(2, call("b")), whole(0, TextPart(text="a")), whole(1, call("a")), CALLS]

    assert assemble(events).parts == (TextPart(text="a"), call("a"), call("b"))


def test_thinking_and_text_without_whole_parts_stand_before_the_calls() -> None:
    events = [ThinkingDelta(text="hm"), TextDelta(text="ok"), whole(0, call()), CALLS]

    assert assemble(events).parts == (ThinkingPart(text="hm"), TextPart(text="ok"), call())


def test_thinking_keeps_the_data_that_its_provider_wants_back() -> None:
    part = ThinkingPart(text="hm", provider_data={"signature": "x"})

    assert assemble([ThinkingDelta(text="h"), whole(0, part), STOP]).parts == (part,)


def test_two_calls_with_the_same_id_or_none_are_both_kept() -> None:
    parts = [call("a", "1"), call("b", "1"), call("a"), call("a")]
    events = [whole(index, part) for index, part in enumerate(parts)]

    assert assemble([*events, CALLS]).parts == tuple(parts)


def test_what_the_provider_said_of_the_response_is_kept() -> None:
    final = ResponseCompleted(
        finish_reason=FinishReason.LENGTH,
        usage=Usage(input_tokens=3, output_tokens=2, cached_tokens=1),
        provider_metadata={"tier": "x"},
    )

    response = assemble([ResponseStarted(id="r1", model="m1"), final])

    assert response == ModelResponse(
        finish_reason=FinishReason.LENGTH,
        usage=final.usage,
        model="m1",
        response_id="r1",
        provider_metadata={"tier": "x"},
    )


def test_an_empty_answer_is_an_answer() -> None:
    assert assemble([STOP]).parts == ()


@pytest.mark.parametrize(
    "events",
    [
        [],
        [ResponseStarted()],
        [ResponseStarted(), TextDelta(text="half")],
        [whole(0, call())],
    ],
)
def test_a_stream_without_its_final_event_is_no_response(events: list[StreamEvent]) -> None:
    with pytest.raises(ModelProtocolError, match="without its final event") as caught:
        assemble(events)

    assert caught.value.retryable


@pytest.mark.parametrize("late", [TextDelta(text="x"), STOP, ResponseStarted(), whole(0, call())])
def test_nothing_may_follow_the_final_event(late: StreamEvent) -> None:
    with pytest.raises(ModelProtocolError, match="after its final event"):
        assemble([STOP, late])


@pytest.mark.parametrize(
    "events",
    [[CALLS], [TextDelta(text="Soon."), CALLS], [whole(0, TextPart(text="")), CALLS]],
)
def test_announced_calls_must_be_there(events: list[StreamEvent]) -> None:
    with pytest.raises(ModelProtocolError, match="announces tool calls"):
        assemble(events)


def test_calls_that_were_not_announced_are_kept() -> None:
    assert assemble([whole(0, call()), STOP]).parts == (call(),)


def test_usage_adds_up() -> None:
    one = Usage(input_tokens=1, output_tokens=2, cached_tokens=3)

    assert one + Usage() == one
    assert one + one == Usage(input_tokens=2, output_tokens=4, cached_tokens=6)
