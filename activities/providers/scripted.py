"""`ScriptedModel`: a model that answers from a script, for tests, demos and first steps.

The reply depends on the request alone (last user message, step, attempt), so another process gives
the same one. It is a model like any other: it streams through the sink and folds its own events.
"""

import asyncio
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from pydantic import JsonValue

from perdure.activities.providers.script import (
    Attempts,
    Call,
    Failure,
    Reply,
    Rule,
    Script,
    ScriptedUsage,
    Step,
    parse_script,
    read_script,
)
from perdure.activities.providers.templates import Values, render_json, render_text
from perdure.contracts.errors import (
    AuthoringError,
    ModelError,
    ModelProtocolError,
    ModelRefused,
    ModelScriptError,
    ModelUnavailable,
)
from perdure.contracts.messages import (
    Message,
    MessageKind,
    Role,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from perdure.contracts.model import (
    ContentPartCompleted,
    FinishReason,
    ModelRequest,
    ModelResponse,
    ModelSink,
    ResponseCompleted,
    ResponseStarted,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    assemble,
)

__all__ = [
    "Attempts",
    "Call",
    "Failure",
    "Reply",
    "Rule",
    "ScriptedModel",
    "ScriptedUsage",
    "attempts",
    "call",
]

_HOLD_POLL_S: Final = 0.01
_REQUESTS_MAX: Final = 4096
_ERRORS: Final[dict[str, type[ModelError]]] = {
    "unavailable": ModelUnavailable,
    "refused": ModelRefused,
    "protocol": ModelProtocolError,
}

Said = str | Call | Reply | Failure | Iterable[str | Call]


class ScriptedModel:
    """Answers by rules: the first rule whose `when` is found in the last user message.

    `record` is a file to which each call appends one line of JSON (`turn_id`, `step`, `attempt`,
    `pid`) before anything else, so that calls can be counted across processes. A model without
    rules must not be called: it raises ModelScriptError.
    """

    def __init__(
        self,
        rules: Iterable[Rule | Mapping[str, Any]] = (),
        *,
        record: str | Path | None = None,
        name: str = "scripted",
    ) -> None:
        script = parse_script({"rules": tuple(rules), "record": record}, name)
        self.name = name
        self._rules = script.rules
        self._record = script.record
        self._requests: deque[ModelRequest] = deque(maxlen=_REQUESTS_MAX)

    @classmethod
    def replies(
        cls,
        *steps: Said | Attempts,
        when: str | None = None,
        repeat: bool = False,
        record: str | Path | None = None,
    ) -> Self:
        """A model with one rule, a reply for each step.

        A reply is a text, a `call(...)`, a list of both, a `Reply`, a `Failure`, or `attempts(...)`
        of such.
        """
        said = tuple(step if isinstance(step, Attempts) else _as_reply(step) for step in steps)
        rules = [{"when": when, "steps": said, "repeat": repeat}] if said else []
        return cls(rules, record=record)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """A model from a YAML or JSON file (`script.py` shows one). Raises AuthoringError.

        The path is taken from the current folder. If there is no such file and its first segment
        is an importable package, as in `perdure.examples/order_desk.yaml`, it is a resource of
        that package.
        """
        script: Script = read_script(str(path))
        return cls(script.rules, record=script.record, name=f"scripted:{path}")

    @property
    def requests(self) -> list[ModelRequest]:
        """The requests that this object was sent, oldest first: the last 4,096 of them."""
        return list(self._requests)

    async def respond(self, request: ModelRequest, sink: ModelSink) -> ModelResponse:
        """Answer from the script, streaming into the sink."""
        self._requests.append(request)
        if self._record is not None:
            _append_record(self._record, request)
        message = _last_user_text(request)
        rule, match = self._find(message)
        reply = _choose(rule, request)
        return await _play(reply, _values(match, request), self.name, request, sink)

    def _find(self, message: str) -> tuple[Rule, re.Match[str]]:
        for rule in self._rules:
            match = rule.match(message)
            if match is not None:
                return rule, match
        raise ModelScriptError(
            f"{self.name}: none of its {len(self._rules)} rules matches the last user message"
        )


def call(tool: str, /, **arguments: Any) -> Call:
    """A call for a reply; `Call(tool=..., arguments=..., id=...)` also takes raw text and an id."""
    return Call(tool=tool, arguments=arguments)


def attempts(*replies: Said) -> Attempts:
    """The replies of one step by its try; the last one repeats."""
    return Attempts(attempts=tuple(_as_reply(reply) for reply in replies))


def _as_reply(said: Said) -> Reply:
    match said:
        case Reply():
            return said
        case str():
            return Reply(text=said)
        case Call():
            return Reply(calls=(said,))
        case Failure():
            return Reply(error=said)
        case _:
            items = tuple(said)
            texts = tuple(item for item in items if isinstance(item, str))
            calls = tuple(item for item in items if isinstance(item, Call))
            if len(texts) + len(calls) != len(items):
                raise AuthoringError("a reply is made of texts and calls")
            return Reply(text=texts or None, calls=calls)


def _choose(rule: Rule, request: ModelRequest) -> Reply:
    index = request.step - 1
    if index >= len(rule.steps):
        if not rule.repeat:
            raise ModelScriptError(
                f"step {request.step} is not scripted: the rule has {len(rule.steps)} step(s)"
            )
        index = len(rule.steps) - 1
    step: Step = rule.steps[index]
    if isinstance(step, Reply):
        return step
    return step.attempts[min(request.attempt, len(step.attempts)) - 1]


async def _play(
    reply: Reply, values: Values, name: str, request: ModelRequest, sink: ModelSink
) -> ModelResponse:
    text = [render_text(chunk, values) for chunk in reply.text_chunks]
    calls = [_call_part(item, values) for item in reply.calls]
    response_id = f"scripted-{request.step}-{request.attempt}"
    events: list[StreamEvent] = [ResponseStarted(id=response_id, model=name)]
    await asyncio.sleep(reply.delay_s)
    for chunk in reply.thinking_chunks:
        await _pause(reply, events)
        events.append(ThinkingDelta(text=chunk))
        await sink.thinking(chunk)
    for index, chunk in enumerate(text):
        await _hold(reply, here=index == reply.hold_after_chunks)
        await _pause(reply, events)
        events.append(TextDelta(text=chunk))
        await sink.text(chunk)
    await _hold(reply, here=reply.hold_after_chunks >= len(text))
    if reply.error is not None:
        error = _ERRORS[reply.error.kind]
        raise error(reply.error.message, retry_after_s=reply.error.retry_after_s)
    events += _whole_parts(reply, text, calls)
    if reply.final_event:
        events.append(_final(reply))
    return assemble(events)


async def _pause(reply: Reply, events: list[StreamEvent]) -> None:
    # The first piece follows `ResponseStarted` at once.
    if reply.chunk_delay_s and len(events) > 1:
        await asyncio.sleep(reply.chunk_delay_s)


async def _hold(reply: Reply, *, here: bool) -> None:
    if not here or reply.hold_file is None:
        return
    # Another process makes the file, so there is no event to wait for.
    while not os.path.exists(reply.hold_file):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(_HOLD_POLL_S)


def _whole_parts(
    reply: Reply, text: list[str], calls: list[ToolCallPart]
) -> list[ContentPartCompleted]:
    parts: list[ThinkingPart | TextPart | ToolCallPart] = []
    if reply.thinking is not None:
        parts.append(ThinkingPart(text="".join(reply.thinking_chunks)))
    if reply.text is not None:
        parts.append(TextPart(text="".join(text)))
    parts += calls
    return [ContentPartCompleted(index=index, part=part) for index, part in enumerate(parts)]


def _final(reply: Reply) -> ResponseCompleted:
    usual = FinishReason.TOOL_CALLS if reply.calls else FinishReason.STOP
    return ResponseCompleted(
        finish_reason=reply.finish_reason or usual, usage=reply.usage.counted()
    )


def _call_part(item: Call, values: Values) -> ToolCallPart:
    if isinstance(item.arguments, dict):
        arguments = {name: render_json(value, values) for name, value in item.arguments.items()}
        return ToolCallPart(name=item.tool, provider_call_id=item.id, arguments=arguments)
    parsed = _parse_object(item.arguments)
    if parsed is not None:
        return ToolCallPart(name=item.tool, provider_call_id=item.id, arguments=parsed)
    return ToolCallPart(name=item.tool, provider_call_id=item.id, arguments_text=item.arguments)


def _parse_object(raw: str) -> dict[str, Any] | None:
    # As an adapter of a provider does it: what is no JSON object stays text.
    try:
        parsed: JsonValue = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _last_user_text(request: ModelRequest) -> str:
    for message in reversed(request.messages):
        if message.role is Role.USER and message.kind is MessageKind.NORMAL:
            return message.text
    return ""


def _values(match: re.Match[str], request: ModelRequest) -> Values:
    numbered = (match[0], *match.groups(default=""))
    groups = {str(number): text for number, text in enumerate(numbered)}
    results: list[str] = []
    latest: dict[str, list[str]] = {}
    by_tool: dict[str, list[str]] = {}
    for message in _of_this_turn(request):
        if message.role is Role.ASSISTANT:
            results, latest = [], {}
        for result in message.results:
            results.append(result.text)
            by_tool[result.name] = latest.setdefault(result.name, [])
            latest[result.name].append(result.text)
    return Values(
        groups=groups | match.groupdict(default=""),
        results=tuple(results),
        results_by_tool={name: tuple(texts) for name, texts in by_tool.items()},
    )


def _of_this_turn(request: ModelRequest) -> tuple[Message, ...]:
    # Each step before this one left exactly one assistant message.
    index, steps = len(request.messages), request.step - 1
    while steps and index:
        index -= 1
        steps -= request.messages[index].role is Role.ASSISTANT
    return request.messages[index:]


def _append_record(path: Path, request: ModelRequest) -> None:
    entry = {
        "turn_id": request.turn_id,
        "step": request.step,
        "attempt": request.attempt,
        "pid": os.getpid(),
    }
    try:
        # One write in append mode, so that lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, (json.dumps(entry) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelScriptError(f"the record {str(path)!r}: {error.strerror}") from error
