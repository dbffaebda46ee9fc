"""A turn's events as messages: every result behind its answer, in call order (promise P4)."""

from typing import Any

from perdure.contracts.conversation import messages_of_turn
from perdure.contracts.events import (
    LedgerEvent,
    ModelAnswered,
    ToolCalled,
    ToolSettled,
    UserMessageRecorded,
)
from perdure.contracts.messages import Part, Role, TextPart, ToolCallPart, user_message
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultStatus

TURN: dict[str, Any] = {"namespace": "n", "conversation_id": "c", "turn_id": "turn_1"}
USER = UserMessageRecorded(
    **TURN, id="u", agent="a", request_id="r", request_digest="d", message=user_message("hi")
)


def answered(step: int, *parts: Part) -> ModelAnswered:
    """A committed answer."""
    return ModelAnswered(**TURN, id=f"a{step}", step=step, attempt=1, parts=parts)


def called(step: int, index: int) -> ToolCalled:
    """One call of it."""
    return ToolCalled(
        **TURN,
        id=f"c{step}.{index}",
        step=step,
        index=index,
        operation_id=f"op{step}.{index}",
        tool="t",
        arguments_digest="d",
        safety=ReplaySafety.SAFE,
    )


def settled(step: int, index: int, status: ResultStatus = ResultStatus.OK) -> ToolSettled:
    """The result of a call."""
    return ToolSettled(
        **TURN,
        id=f"s{step}.{index}",
        step=step,
        index=index,
        operation_id=f"op{step}.{index}",
        tool="t",
        status=status,
        text=f"result {step}.{index}",
    )


def shape(events: list[LedgerEvent]) -> list[tuple[Role, list[str]]]:
    """Roles, with the ids of calls and results, or the text."""
    return [
        (message.role, [part.call_id for part in message.calls + message.results] or [message.text])
        for message in messages_of_turn(events)
    ]


def test_an_opened_turn_is_its_user_message() -> None:
    assert shape([USER]) == [(Role.USER, ["hi"])]


def test_results_stand_in_call_order_though_they_were_settled_in_another() -> None:
    calls = (ToolCallPart(name="t", provider_call_id="x"),) * 2
    events = [USER, answered(1, *calls), called(1, 0), called(1, 1), settled(1, 1), settled(1, 0)]

    assert shape(events) == [
        (Role.USER, ["hi"]),
        (Role.ASSISTANT, ["op1.0", "op1.1"]),
        (Role.TOOL, ["op1.0", "op1.1"]),
    ]


def test_each_result_stands_right_behind_its_own_answer() -> None:
    call = ToolCallPart(name="t")
    events = [
        *(USER, answered(1, call), called(1, 0), settled(1, 0)),
        *(answered(2, call), called(2, 0), settled(2, 0), answered(3, TextPart(text="done"))),
    ]

    roles = [role for role, _ in shape(events)]
    assert roles == [Role.USER, *[Role.ASSISTANT, Role.TOOL] * 2, Role.ASSISTANT]


def test_a_call_without_a_result_yet_has_none() -> None:
    events = [USER, answered(1, *[ToolCallPart(name="t")] * 2), called(1, 0), called(1, 1)]

    assert shape([*events, settled(1, 1)])[2:] == [(Role.TOOL, ["op1.1"])]
    assert len(shape(events)) == 2


def test_an_answer_without_content_is_left_out() -> None:
    assert shape([USER, answered(1)]) == [(Role.USER, ["hi"])]


def test_a_result_that_is_not_ok_is_an_error_to_the_model() -> None:
    events = [USER, answered(1, ToolCallPart(name="t")), called(1, 0)]

    messages = messages_of_turn([*events, settled(1, 0, ResultStatus.INTERRUPTED)])

    (result,) = messages[-1].results
    assert result.is_error
    assert result.text == "result 1.0"
