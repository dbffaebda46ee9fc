"""The scripted model: rules, steps, tries, templates, streams and errors."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.providers import ScriptedModel
from perdure.activities.providers.scripted import (
    Call,
    Failure,
    Reply,
    ScriptedUsage,
    attempts,
    call,
)
from perdure.agents import Agent
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
    ToolResultPart,
    assistant_message,
    user_message,
)
from perdure.contracts.model import FinishReason, ModelRequest, ModelResponse, Usage


class Sink:
    """Remembers what was streamed; `streamed` is set at each piece."""

    def __init__(self) -> None:
        self.deltas: list[tuple[str, str]] = []
        self.streamed = asyncio.Event()

    async def text(self, delta: str) -> None:
        self.deltas.append(("text", delta))
        self.streamed.set()

    async def thinking(self, delta: str) -> None:
        self.deltas.append(("thinking", delta))
        self.streamed.set()


def request(*messages: Message | str, **facts: Any) -> ModelRequest:
    listed = (item if isinstance(item, Message) else user_message(item) for item in messages)
    return ModelRequest(agent="a", model="m", messages=tuple(listed), **facts)


def called(*tools: str) -> Message:
    return Message(role=Role.ASSISTANT, parts=tuple(ToolCallPart(name=name) for name in tools))


def results(*pairs: tuple[str, str]) -> Message:
    parts = tuple(ToolResultPart(call_id="", name=name, text=text) for name, text in pairs)
    return Message(role=Role.TOOL, parts=parts)


async def ask(model: ScriptedModel, *messages: Message | str, **facts: Any) -> ModelResponse:
    return await model.respond(request(*messages, **facts), Sink())


def text_of(response: ModelResponse) -> str:
    return "".join(part.text for part in response.parts if isinstance(part, TextPart))


def arguments_of(response: ModelResponse) -> list[dict[str, Any]]:
    return [part.arguments for part in response.parts if isinstance(part, ToolCallPart)]


def one_step(**reply: Any) -> ScriptedModel:
    return ScriptedModel([{"steps": [reply]}])


async def test_each_step_has_its_reply():
    model = ScriptedModel.replies(["Looking.", call("look", order=1)], "Done.")

    first = await ask(model, "hello", step=1)
    second = await ask(model, "hello", step=2)

    assert first.parts == (
        TextPart(text="Looking."), ToolCallPart(name="look", arguments={"order": 1}),
    )  # fmt: skip
    assert first.finish_reason is FinishReason.TOOL_CALLS
    assert second.parts == (TextPart(text="Done."),)
    assert second.finish_reason is FinishReason.STOP


async def test_the_reply_depends_on_the_request_alone():
    model = ScriptedModel.replies("one", "two")

    assert text_of(await ask(model, "x", step=2)) == "two"
    assert text_of(await ask(model, "x", step=1)) == "one"
    assert text_of(await ask(model, "x", step=1, attempt=7)) == "one"


async def test_a_step_after_the_last_is_not_scripted():
    with pytest.raises(ModelScriptError, match="step 3 is not scripted: the rule has 2"):
        await ask(ScriptedModel.replies("one", "two"), "x", step=3)


async def test_the_last_step_repeats_where_the_rule_says_so():
    model = ScriptedModel.replies("one", "two", repeat=True)

    assert text_of(await ask(model, "x", step=50)) == "two"


async def test_a_model_without_rules_must_not_be_called():
    with pytest.raises(ModelScriptError, match="none of its 0 rules") as caught:
        await ask(ScriptedModel(), "x")

    assert not caught.value.retryable
    with pytest.raises(ModelScriptError):
        await ask(ScriptedModel.replies(), "x")


async def test_the_first_rule_that_is_found_in_the_last_user_message_answers():
    model = ScriptedModel(
        [
            {"when": "^status", "steps": [{"text": "status"}]},
            {"when": "(?i)REFUND", "steps": [{"text": "refund"}]},
            {"when": "refund", "steps": [{"text": "never"}]},
        ]
    )

    assert text_of(await ask(model, "status", assistant_message("hm"), "a refund")) == "refund"
    assert text_of(await ask(model, "a refund", assistant_message("hm"), "status")) == "status"
    with pytest.raises(ModelScriptError, match="none of its 3 rules"):
        await ask(model, "something else")


async def test_markers_and_other_roles_are_not_the_last_user_message():
    model = ScriptedModel.replies("{0}", when=".+")

    answer = await ask(
        model,
        "the question",
        called("look"),
        results(("look", "a result")),
        user_message("a note", MessageKind.MARKER),
        step=1,
    )

    assert text_of(answer) == "the question"


async def test_a_request_without_a_user_message_matches_only_rules_for_all():
    assert text_of(await ask(ScriptedModel.replies("any"))) == "any"
    with pytest.raises(ModelScriptError):
        await ask(ScriptedModel.replies("any", when="."))


async def test_tries_have_replies_of_their_own_and_the_last_repeats():
    model = ScriptedModel.replies(attempts(Failure(kind="unavailable"), "second"), "other step")

    with pytest.raises(ModelUnavailable):
        await ask(model, "x", attempt=1)
    assert text_of(await ask(model, "x", attempt=2)) == "second"
    assert text_of(await ask(model, "x", attempt=9)) == "second"
    assert text_of(await ask(model, "x", step=2, attempt=1)) == "other step"


async def test_thinking_and_text_stream_in_order_and_become_whole_parts():
    sink = Sink()
    model = one_step(thinking=["Let me ", "see."], text=["It ", "is ", "so."])

    response = await model.respond(request("x"), sink)

    assert sink.deltas == [
        ("thinking", "Let me "), ("thinking", "see."),
        ("text", "It "), ("text", "is "), ("text", "so."),
    ]  # fmt: skip
    assert response.parts == (ThinkingPart(text="Let me see."), TextPart(text="It is so."))


async def test_a_reply_of_nothing_is_an_empty_message():
    assert (await ask(one_step(), "x")).parts == ()
    assert (await ask(one_step(text=""), "x")).parts == (TextPart(text=""),)


async def test_finish_reason_and_usage_are_as_scripted():
    usage = {"input_tokens": 5, "output_tokens": 6, "cached_tokens": 2}

    response = await ask(one_step(text="cut", finish_reason="length", usage=usage), "x")

    assert response.finish_reason is FinishReason.LENGTH
    assert response.usage == Usage.model_validate(usage)
    assert response.model == "scripted"


@pytest.mark.parametrize(
    ("kind", "error", "retryable"),
    [
        ("unavailable", ModelUnavailable, True),
        ("refused", ModelRefused, False),
        ("protocol", ModelProtocolError, True),
    ],
)
async def test_an_error_is_raised_after_the_text_has_streamed(
    kind: str, error: type[ModelError], retryable: bool
):
    sink = Sink()
    model = one_step(
        text=["half", " an"], error={"kind": kind, "message": "busy", "retry_after_s": 1.5}
    )

    with pytest.raises(error, match="busy") as caught:
        await model.respond(request("x"), sink)

    assert sink.deltas == [("text", "half"), ("text", " an")]
    assert caught.value.retryable is retryable
    assert caught.value.retry_after_s == 1.5


async def test_a_stream_without_its_final_event_is_a_protocol_error():
    sink = Sink()

    with pytest.raises(ModelProtocolError, match="without its final event"):
        await one_step(text="half", final_event=False).respond(request("x"), sink)

    assert sink.deltas == [("text", "half")]


async def test_announced_calls_that_are_missing_are_a_protocol_error():
    with pytest.raises(ModelProtocolError, match="announces tool calls"):
        await ask(one_step(text="x", finish_reason="tool_calls"), "x")


async def test_calls_keep_ids_that_repeat_and_raw_arguments():
    model = ScriptedModel.replies(
        [
            Call(tool="look", arguments={"a": 1}, id="same"),
            Call(tool="look", arguments='{"a": ', id="same"),
            Call(tool="look", arguments=""),
            Call(tool="look", arguments="[1]"),
            Call(tool="look", arguments='{"a": NaN}'),
            Call(tool="look", arguments='{"a": "{1}"}'),
        ]
    )

    parts = (await ask(model, "x")).parts

    assert parts == (
        ToolCallPart(name="look", provider_call_id="same", arguments={"a": 1}),
        ToolCallPart(name="look", provider_call_id="same", arguments_text='{"a": '),
        ToolCallPart(name="look", arguments_text=""),
        ToolCallPart(name="look", arguments_text="[1]"),
        ToolCallPart(name="look", arguments_text='{"a": NaN}'),
        ToolCallPart(name="look", arguments={"a": "{1}"}),
    )


async def test_more_calls_than_a_step_may_have_can_be_scripted():
    response = await ask(ScriptedModel.replies([call("look", n=n) for n in range(129)]), "x")

    assert arguments_of(response) == [{"n": n} for n in range(129)]


async def test_groups_of_the_match_fill_text_and_arguments():
    model = ScriptedModel(
        [
            {
                "when": r"refund (?P<what>\w+) (\d+)( now)?",
                "steps": [
                    {
                        "text": ["{what} ", "number {2}{3}, {{literally}} {2:int}"],
                        "calls": [
                            {
                                "tool": "refund",
                                "arguments": {
                                    "number": "{2:int}",
                                    "price": "{2:float}",
                                    "text": "{2}",
                                    "nested": [{"note": "{what}-{2:int}", "kept": None}, True, 1.5],
                                },
                            }
                        ],
                    }
                ],
            }
        ]
    )

    response = await ask(model, "please refund order 007")

    assert text_of(response) == "order number 007, {literally} 7"
    assert arguments_of(response) == [
        {
            "number": 7,
            "price": 7.0,
            "text": "007",
            "nested": [{"note": "order-7", "kept": None}, True, 1.5],
        }
    ]


async def test_a_group_that_is_no_number_is_a_mistake_of_the_script():
    model = ScriptedModel.replies(call("look", n="{1:int}"), when="order (.+)")

    with pytest.raises(ModelScriptError, match="not of that type") as caught:
        await ask(model, "order canary")

    assert "canary" not in str(caught.value)


async def test_results_of_the_previous_step_fill_a_template():
    model = ScriptedModel.replies(
        call("look"), "All: {results}. Ship: {result:ship}.", "Look: {result:look}; {results}"
    )
    turn = [
        user_message("x"),
        called("look", "ship", "look"),
        results(("look", "one"), ("ship", "sent")),
        results(("look", "two")),
    ]
    later = [*turn, called("ship"), results(("ship", "again"))]

    second = await ask(model, *turn, step=2)
    third = await ask(model, *later, step=3)

    assert text_of(second) == "All: one\nsent\ntwo. Ship: sent."
    assert text_of(third) == "Look: one\ntwo; again"


async def test_results_survive_a_user_message_that_came_in_between():
    model = ScriptedModel.replies("-", "{results}")

    answer = await ask(model, "x", called("look"), results(("look", "one")), "by the way", step=2)

    assert text_of(answer) == "one"


async def test_results_of_an_earlier_turn_are_not_used():
    model = ScriptedModel.replies("{results}|", "{result:look}")
    earlier = ["x", called("look"), results(("look", "old")), assistant_message("done")]

    assert text_of(await ask(model, *earlier, "y", step=1)) == "|"
    with pytest.raises(ModelScriptError, match=r"\{result:look\}: the tool has no result"):
        await ask(model, *earlier, "y", called("ship"), results(("ship", "z")), step=2)


async def test_delays_pass_before_the_reply_and_between_its_pieces():
    sink = Sink()
    model = one_step(text=["a", "b", "c"], delay_s=0.02, chunk_delay_s=0.02)

    begun = time.monotonic()
    await model.respond(request("x"), sink)

    assert time.monotonic() - begun >= 0.06
    assert len(sink.deltas) == 3


async def test_a_held_reply_waits_for_its_file(tmp_path: Path):
    gate = tmp_path / "go"
    sink = Sink()
    model = one_step(text=["a", "b"], hold_file=str(gate), hold_after_chunks=1)

    answering = asyncio.create_task(model.respond(request("x"), sink))
    await sink.streamed.wait()
    assert sink.deltas == [("text", "a")]
    assert not answering.done()
    gate.touch()

    assert text_of(await answering) == "ab"


@pytest.mark.parametrize("after", [0, 1, 2, 9])
async def test_a_held_reply_can_be_cancelled_anywhere(tmp_path: Path, after: int):
    sink = Sink()
    model = one_step(
        thinking="hm", text=["a", "b"], hold_file=tmp_path / "never", hold_after_chunks=after
    )

    answering = asyncio.create_task(model.respond(request("x"), sink))
    await sink.streamed.wait()
    answering.cancel()

    with pytest.raises(asyncio.CancelledError):
        await answering
    assert len(sink.deltas) == 1 + min(after, 2)


async def test_an_error_can_be_held(tmp_path: Path):
    gate = tmp_path / "go"
    model = one_step(error={"kind": "refused"}, hold_file=gate)

    answering = asyncio.create_task(ask(model, "x"))
    done, _ = await asyncio.wait({answering}, timeout=0.05)
    assert not done
    gate.touch()

    with pytest.raises(ModelRefused):
        await answering


async def test_requests_of_this_process_are_remembered():
    model = ScriptedModel.replies("a", repeat=True)

    await ask(model, "one")
    await ask(model, "two", step=2)

    assert [item.step for item in model.requests] == [1, 2]
    assert model.requests[1].messages[0].text == "two"


async def test_each_call_is_recorded_before_the_reply(tmp_path: Path):
    record = tmp_path / "calls.jsonl"
    model = ScriptedModel.replies("a", record=record)

    await ask(model, "x", turn_id="turn_1", step=1, attempt=2)
    with pytest.raises(ModelScriptError):
        await ask(model, "x", turn_id="turn_1", step=2)

    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["turn_id"], line["step"], line["attempt"]) for line in lines] == [
        ("turn_1", 1, 2), ("turn_1", 2, 1),
    ]  # fmt: skip
    assert set(lines[0]) == {"turn_id", "step", "attempt", "pid"}


async def test_a_record_that_cannot_be_written_is_a_mistake_of_the_script(tmp_path: Path):
    model = ScriptedModel.replies("a", record=tmp_path / "missing" / "calls.jsonl")

    with pytest.raises(ModelScriptError, match="No such file"):
        await ask(model, "x")


@pytest.mark.parametrize(
    ("template", "when", "reason"),
    [
        ("{", None, "a single brace"),
        ("}", None, "a single brace"),
        ("{}", None, "is no group"),
        ("{1}", "no groups", "{1} is no group"),
        ("{order}", "(?P<other>x)", "{order} is no group"),
        ("{1:date}", "(x)", "the type int or float"),
        ("{result}", None, "needs the name of a tool"),
        ("{results:look}", None, "takes no detail"),
        ("x", "(?P<results>x)", "cannot have the name 'results'"),
    ],
)
@pytest.mark.parametrize("place", ["text", "arguments"])
def test_a_bad_template_is_refused_when_the_model_is_made(
    template: str, when: str | None, reason: str, place: str
):
    said = template if place == "text" else call("look", deep=[{"x": template}])

    with pytest.raises(AuthoringError) as caught:
        ScriptedModel.replies(attempts(said), when=when)

    assert reason in str(caught.value)


def test_a_reply_in_python_is_made_of_texts_and_calls():
    with pytest.raises(AuthoringError, match="made of texts and calls"):
        ScriptedModel.replies(["text", 5])  # type: ignore[list-item]


async def test_a_reply_in_python_may_be_given_whole():
    model = ScriptedModel.replies(Reply(text="a", usage=ScriptedUsage(output_tokens=1)))

    assert (await ask(model, "x")).usage.output_tokens == 1


def test_an_agent_takes_a_scripted_model_and_records_its_name():
    assert Agent("a", ScriptedModel.replies("x")).model_name == "scripted"
