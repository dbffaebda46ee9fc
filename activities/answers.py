"""From a model's response to what the ledger records: the answer and one planned call each.

Everything invalid about a call becomes a result for the model and is never executed (DESIGN 5):
unknown tool, tool outside the turn's selection, arguments that are malformed, no object or do not
fit, a call beyond the 128th. Pure but for the tools' own validation.
"""

import json
import re
from typing import Any, cast

from perdure.activities.results import refused
from perdure.agents import Agent, InvalidArguments
from perdure.contracts.calls import TurnRef
from perdure.contracts.canonical import (
    canonical_json,
    content_digest,
    encoded_bytes,
    nests_deeper,
    sanitised,
)
from perdure.contracts.errors import ModelContentRefused, ModelProtocolError
from perdure.contracts.events import (
    ModelAnswered,
    ToolCalled,
    answered_event_id,
    called_event_id,
)
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.limits import (
    ANSWER_PARTS_BYTES_MAX,
    ARGUMENTS_BYTES_MAX,
    CALLS_PER_STEP_MAX,
    ID_CHARS_MAX,
    NESTING_LEVELS_MAX,
    TOOL_NAME_CHARS_MAX,
)
from perdure.contracts.messages import Part, TextPart, ThinkingPart, ToolCallPart, ToolResultPart
from perdure.contracts.model import FinishReason, ModelResponse
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ToolOutcome
from perdure.stores.commands import CommitAnswer, PlannedCall

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


def plan_answer(
    ref: TurnRef,
    step: int,
    attempt: int,
    response: ModelResponse,
    agent: Agent,
    selected: tuple[str, ...] | None,
) -> CommitAnswer:
    """What to commit. Raises ModelProtocolError for a response that cannot be an answer."""
    check_response(response)
    parts: list[Part] = []
    planned: list[PlannedCall] = []
    for part in response.parts:
        if isinstance(part, ToolCallPart):
            clean, call = _plan_call(ref, step, len(planned), part, agent, selected)
            parts.append(clean)
            planned.append(call)
        elif not (isinstance(part, TextPart) and not part.text):
            # No provider takes an empty block.
            parts.append(part)
    answered = ModelAnswered(
        id=answered_event_id(ref.turn_id, step),
        namespace=ref.namespace,
        conversation_id=ref.conversation_id,
        turn_id=ref.turn_id,
        step=step,
        attempt=attempt,
        model=response.model,
        parts=tuple(parts),
        finish_reason=response.finish_reason,
        usage=response.usage,
    )
    command = CommitAnswer(turn=ref, answered=answered, calls=tuple(planned))
    if agent.output is None or planned:
        return command
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    read = agent.output.read(text)
    return command.model_copy(update={"output_json": read.json, "output_problem": read.problem})


def check_response(response: ModelResponse) -> None:
    """Raises ModelProtocolError: calls announced and missing, results in an answer, too large,
    provider data that is no JSON. Raises ModelContentRefused for an answer that was filtered.
    """
    has_call = any(isinstance(part, ToolCallPart) for part in response.parts)
    if response.finish_reason is FinishReason.TOOL_CALLS and not has_call:
        raise ModelProtocolError("the response announces tool calls and has none")
    if response.finish_reason is FinishReason.CONTENT_FILTER:
        raise ModelContentRefused("the provider's policy filtered the answer")
    if any(isinstance(part, ToolResultPart) for part in response.parts):
        raise ModelProtocolError("the response contains tool results; only we write those")
    size = _encoded_parts_bytes(response)
    if size > ANSWER_PARTS_BYTES_MAX:
        raise ModelProtocolError(
            f"the response has {size} encoded bytes, at most {ANSWER_PARTS_BYTES_MAX} fit",
            retryable=False,
        )


def _encoded_parts_bytes(response: ModelResponse) -> int:
    for part in response.parts:
        data = part.provider_data if isinstance(part, (ThinkingPart, ToolCallPart)) else None
        if nests_deeper(data, NESTING_LEVELS_MAX):
            raise ModelProtocolError("the response's provider data is nested too deep")
        try:
            canonical_json(data)
        except (ValueError, TypeError, RecursionError):
            raise ModelProtocolError("the response's provider data is no JSON") from None
    parts = [part.model_copy(update={"arguments": {}}) for part in response.parts]
    shown = [part.model_dump(mode="json") for part in parts]
    raw = [part.arguments for part in response.parts if isinstance(part, ToolCallPart)]
    try:
        return encoded_bytes(shown) + encoded_bytes(raw)
    except (ValueError, TypeError, RecursionError):
        # Arguments that are no JSON are their call's own problem: it is told so.
        return encoded_bytes(shown)


def _plan_call(
    ref: TurnRef,
    step: int,
    index: int,
    part: ToolCallPart,
    agent: Agent,
    selected: tuple[str, ...] | None,
) -> tuple[ToolCallPart, PlannedCall]:
    arguments, problem = _read_arguments(part)
    name = _NOT_IN_A_NAME.sub("_", part.name)[:TOOL_NAME_CHARS_MAX] or "_"
    refusal = problem
    if index >= CALLS_PER_STEP_MAX:
        text = f"not executed: this was call {index + 1}; a step may have {CALLS_PER_STEP_MAX}"
        refusal = refused(ResultReason.TOO_MANY_CALLS, text)
    elif refusal is None or agent.tool(part.name) is None:
        refusal = _refuse(part.name, arguments, agent, selected)
    tool = agent.tool(part.name)
    operation_id = derive_operation_id(ref.turn_id, step, index)
    called = ToolCalled(
        id=called_event_id(operation_id),
        namespace=ref.namespace,
        conversation_id=ref.conversation_id,
        turn_id=ref.turn_id,
        step=step,
        index=index,
        operation_id=operation_id,
        tool=name,
        provider_call_id=part.provider_call_id[:ID_CHARS_MAX],
        arguments=arguments,
        arguments_digest=content_digest(canonical_json({"arguments": arguments, "tool": name})),
        safety=tool.replay if tool is not None else ReplaySafety.UNSAFE,
    )
    clean = part.model_copy(
        update={
            "name": name,
            "call_id": operation_id,
            "arguments": arguments,
            "arguments_text": part.arguments_text if problem is not None else None,
        }
    )
    return clean, PlannedCall(called=called, refusal=refusal)


def _read_arguments(part: ToolCallPart) -> tuple[dict[str, Any], ToolOutcome | None]:
    raw = part.arguments_text
    if raw is None:
        value: Any = part.arguments
    elif not raw.strip():
        value = {}
    else:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return {}, _invalid("they are not valid JSON")
    if not isinstance(value, dict):
        return {}, _invalid("they are no JSON object")
    if nests_deeper(value, NESTING_LEVELS_MAX):
        return {}, _invalid(f"they are nested deeper than {NESTING_LEVELS_MAX} levels")
    try:
        arguments = cast("dict[str, Any]", sanitised(value))
        size = len(canonical_json(arguments).encode())
    except (ValueError, TypeError, RecursionError):
        return {}, _invalid("they contain values that JSON does not have")
    if size > ARGUMENTS_BYTES_MAX:
        return {}, _invalid(f"they have {size} bytes, at most {ARGUMENTS_BYTES_MAX} fit")
    return arguments, None


def _invalid(why: str) -> ToolOutcome:
    text = f"not executed: the arguments cannot be used: {why}. Correct them and call again."
    return refused(ResultReason.INVALID_ARGUMENTS, text)


def _refuse(
    name: str, arguments: dict[str, Any], agent: Agent, selected: tuple[str, ...] | None
) -> ToolOutcome | None:
    tool = agent.tool(name)
    if tool is None:
        offered = ", ".join(spec.name for spec in agent.specs(selected)) or "none"
        text = f"not executed: there is no tool {name!r}. The tools are: {offered}."
        return refused(ResultReason.UNKNOWN_TOOL, text)
    if selected is not None and name not in selected:
        text = f"not executed: the tool {name!r} may not be used in this turn."
        return refused(ResultReason.CAPABILITY_DENIED, text)
    try:
        tool.validate_arguments(arguments)
    except InvalidArguments as error:
        return _invalid(str(error))
    return None
