"""A conversation as readers see it, and how a turn's events become messages.

Pure: the store writes what `messages_of_turn` says, and the model is sent the same.
"""

from collections.abc import Iterable
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from perdure.contracts.errors import LedgerCorruption
from perdure.contracts.events import (
    LedgerEvent,
    ModelAnswered,
    OutputRefused,
    ToolCalled,
    ToolSettled,
    UserMessageRecorded,
)
from perdure.contracts.messages import (
    Message,
    MessageKind,
    Part,
    Role,
    ToolCallPart,
    ToolResultPart,
    user_message,
)
from perdure.contracts.tools import ResultStatus


class TranscriptEntry(BaseModel):
    """One message of the transcript; `sequence` is 1-based and contiguous over messages."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    sequence: int
    version: int
    turn_id: str | None = None
    message: Message
    recorded_at: datetime


class ConversationState(BaseModel):
    """Version (+1 per append, not per message) and the turn that holds the conversation."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    namespace: str
    conversation_id: str
    version: int = 0
    last_sequence: int = 0
    active_turn_id: str | None = None


def messages_of_turn(events: Iterable[LedgerEvent]) -> list[Message]:
    """What a turn's events are as messages: the user's, then each answer with its results, or with
    the reason why it could not be used.

    Results stand right behind their answer, in call order (promise P4); a call without a result
    yet has none here. Answers without content are left out: no provider takes them.
    """
    messages: list[Message] = []
    answers: dict[int, ModelAnswered] = {}
    called: dict[int, dict[int, ToolCalled]] = {}
    settled: dict[str, ToolSettled] = {}
    refused: dict[int, OutputRefused] = {}
    for event in events:
        match event:
            case UserMessageRecorded():
                messages.append(event.message)
            case ModelAnswered():
                answers[event.step] = event
            case ToolCalled():
                called.setdefault(event.step, {})[event.index] = event
            case ToolSettled():
                settled[event.operation_id] = event
            case OutputRefused():
                refused[event.step] = event
            case _:
                # Other facts are not part of what was said.
                continue
    for step in sorted(answers):
        calls = [called[step][index] for index in sorted(called.get(step, {}))]
        messages.extend(_answer_messages(answers[step], calls, settled))
        if step in refused:
            messages.append(user_message(refused[step].text, MessageKind.REPAIR))
    return messages


def _answer_messages(
    answer: ModelAnswered, calls: list[ToolCalled], settled: dict[str, ToolSettled]
) -> list[Message]:
    if not answer.parts:
        return []
    remaining = iter(calls)
    parts: list[Part] = []
    for part in answer.parts:
        if isinstance(part, ToolCallPart):
            call = next(remaining, None)
            if call is None:
                raise LedgerCorruption("call_missing", f"answer {answer.id} has unrecorded calls")
            part = part.model_copy(update={"call_id": call.operation_id})
        parts.append(part)
    results = tuple(
        ToolResultPart(
            call_id=call.operation_id,
            name=call.tool,
            text=result.text,
            is_error=result.status is not ResultStatus.OK,
            flags=result.flags,
            structured=result.structured,
        )
        for call in calls
        if (result := settled.get(call.operation_id)) is not None
    )
    answered = Message(role=Role.ASSISTANT, parts=tuple(parts))
    return [answered, Message(role=Role.TOOL, parts=results)] if results else [answered]
