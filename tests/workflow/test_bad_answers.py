"""Whatever a model asks for: the turn ends well, nothing runs twice, the transcript stays valid.

Each test runs a next turn of the conversation and checks all that its model is sent.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from harness.turns import (
    Answers,
    assert_next_turn_is_valid,
    assert_sendable,
    call,
    calls,
    details,
    operations,
    run_turn,
    text,
)
from temporalio.client import Client

from perdure import Agent, App, tool
from perdure.activities.providers.scripted import Attempts, Reply, ScriptedModel
from perdure.contracts.errors import ModelProtocolError
from perdure.contracts.messages import TextPart, ThinkingPart, ToolCallPart, ToolResultPart
from perdure.contracts.model import FinishReason, ModelResponse
from perdure.stores import Store


class Desk:
    """An app with a tool that counts its effects by what it is told."""

    def __init__(self, *steps: Any) -> None:
        self.effects: Counter[Any] = Counter()
        self.model = Answers(*steps)

        @tool
        async def note(item: int, *, tags: list[str] | None = None) -> str:
            """Note an item."""
            self.effects[item] += 1
            return f"noted {item}"

        self.app = App([Agent("desk", self.model, tools=[note])])


async def refused_calls(
    running: Any, client: Client, task_queue: str, store: Store, *asked: Any
) -> tuple[Any, ...]:
    """Run a turn whose model asks for calls that must not be executed; returns the calls."""
    desk = Desk(calls(*asked), text("sorry"))
    async with running(desk.app):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    assert (result.status, result.answer) == ("completed", "sorry")
    assert desk.effects == {}
    for told in desk.model.requests[1].messages[-1].results:
        assert told.is_error
        assert told.text.startswith("not executed: ")
    refused = operations(store, result)
    assert [(one.status, one.generations) for one in refused] == [("refused", ())] * len(asked)
    return refused


async def test_malformed_arguments_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    raws = ['{"item": 1', "{item: 1}", "\x00\ud800", '{"item": 1} x']
    asked = [call("note", raw=raw) for raw in raws]
    refused = await refused_calls(running, client, task_queue, file_store, *asked)

    assert {(one.reason, one.arguments) for one in refused} == {("invalid_arguments", "{}")}


async def test_arguments_that_are_no_object_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    asked = [call("note", raw=raw) for raw in ["[1]", '"item"', "null", "3"]]
    refused = await refused_calls(running, client, task_queue, file_store, *asked)

    assert {(one.reason, one.arguments) for one in refused} == {("invalid_arguments", "{}")}
    assert all("no JSON object" in one.text for one in refused)


async def test_missing_arguments_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    (only,) = await refused_calls(running, client, task_queue, file_store, call("note"))

    assert only.reason == "invalid_arguments"
    assert "item" in only.text


async def test_surplus_arguments_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    asked = call("note", item=1, colour="red")
    (only,) = await refused_calls(running, client, task_queue, file_store, asked)

    assert only.reason == "invalid_arguments"
    assert "colour" in only.text


async def test_arguments_of_another_type_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    asked = call("note", item="many")
    (only,) = await refused_calls(running, client, task_queue, file_store, asked)

    assert only.reason == "invalid_arguments"


async def test_arguments_nested_too_deep_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    raws = ['{"item":' * depth + "1" + "}" * depth for depth in (300, 700, 100_000)]
    asked = [call("note", raw=raw) for raw in raws]
    refused = await refused_calls(running, client, task_queue, file_store, *asked)

    assert {one.reason for one in refused} == {"invalid_arguments"}


async def test_arguments_that_are_not_json_are_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    asked = [call("note", item=float("nan")), call("note", item={1, 2})]
    refused = await refused_calls(running, client, task_queue, file_store, *asked)

    assert {(one.reason, one.arguments) for one in refused} == {("invalid_arguments", "{}")}


async def test_an_unknown_tool_is_a_result_for_the_model(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    names = ["sudo", "", "no such/tool\x00\ud800", "t" * 5000]
    asked = [call(name, item=1) for name in names]
    refused = await refused_calls(running, client, task_queue, file_store, *asked)

    assert {one.reason for one in refused} == {"unknown_tool"}
    assert all("note" in one.text for one in refused)


async def test_empty_arguments_are_an_empty_object(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    seen: list[str] = []

    @tool
    async def ping() -> str:
        seen.append("ping")
        return "pong"

    model = Answers(calls(call("ping", raw=""), call("ping", raw="  ")), text("done"))
    async with running(App([Agent("desk", model, tools=[ping])])):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, model)

    assert seen == ["ping", "ping"]
    assert [op.status for op in operations(file_store, result)] == ["ok", "ok"]


@pytest.mark.parametrize("call_id", ["same", ""], ids=["the same id", "empty ids"])
async def test_calls_that_share_an_id_are_told_apart(
    running: Any, client: Client, task_queue: str, file_store: Store, call_id: str
) -> None:
    asked = [call("note", call_id=call_id, item=item) for item in (1, 2)]
    desk = Desk(calls(*asked), calls(*asked), text("done"))

    async with running(desk.app):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    # Two steps asked for both: four calls, one effect each, results in call order.
    assert desk.effects == {1: 2, 2: 2}
    told = desk.model.requests[2].messages
    assert [part.text for part in told[2].results] == ["noted 1", "noted 2"]
    assert [part.text for part in told[4].results] == ["noted 1", "noted 2"]
    assert [part.provider_call_id for part in told[1].calls] == [call_id, call_id]
    assert len({op.operation_id for op in operations(file_store, result)}) == 4


@pytest.mark.parametrize(
    "parts",
    [(), (TextPart(text=""),), (ThinkingPart(text="hm"), TextPart(text=""))],
    ids=["no parts", "an empty text", "only thinking"],
)
async def test_an_empty_assistant_message_ends_the_turn_with_an_empty_answer(
    running: Any, client: Client, task_queue: str, parts: Any
) -> None:
    desk = Desk(ModelResponse(parts=parts))
    async with running(desk.app):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    assert (result.status, result.answer) == ("completed", "")


async def test_an_empty_text_beside_a_call_is_not_sent_on(
    running: Any, client: Client, task_queue: str
) -> None:
    response = calls(call("note", item=1))
    desk = Desk(
        response.model_copy(update={"parts": (TextPart(text=""), *response.parts)}), text("done")
    )
    async with running(desk.app):
        await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    assert [type(part) for part in desk.model.requests[1].messages[1].parts] == [ToolCallPart]


async def assert_asked_again(
    running: Any, client: Client, task_queue: str, store: Store, broken: list[Any]
) -> None:
    """Each is a try that failed; the answer of the next one counts, and nothing else happened."""
    desks = [Desk([one, calls(call("note", item=1))], text("done")) for one in broken]
    agents = [
        Agent(f"desk{number}", desk.model, tools=desk.app.agent("desk").tools)
        for number, desk in enumerate(desks)
    ]

    async def check(number: int) -> None:
        desk, changes = desks[number], {"agent": f"desk{number}", "conversation_id": f"c{number}"}
        result = await run_turn(client, task_queue, **changes)
        assert (result.status, result.answer) == ("completed", "done"), broken[number]
        await assert_next_turn_is_valid(client, task_queue, desk.model, **changes)
        assert desk.effects == {1: 1}
        attempts = details(store, result).model_attempts
        assert [(one.step, one.status, one.error_code) for one in attempts] == [
            (1, "failed", "model_protocol_error"),
            (1, "committed", None),
            (2, "committed", None),
        ]

    async with running(App(agents)):
        await asyncio.gather(*map(check, range(len(broken))))


async def test_a_broken_response_is_asked_for_again(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    broken = [
        # What `assemble` raises for a stream without its final event.
        ModelProtocolError("no final event", retry_after_s=0.01),
        # Calls announced and missing, and a result that only we may write.
        ModelResponse(finish_reason=FinishReason.TOOL_CALLS),
        ModelResponse(parts=(ToolResultPart(call_id="x", name="note", text="forged"),)),
    ]

    await assert_asked_again(running, client, task_queue, file_store, broken)


async def test_a_response_without_its_final_event_is_asked_for_again(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    cut_off = Reply(text=("half an ", "answer"), final_event=False)
    model = ScriptedModel.replies(Attempts(attempts=(cut_off, Reply(text="whole"))), repeat=True)
    async with running(App([Agent("desk", model)])):
        result = await run_turn(client, task_queue)
        after = await run_turn(client, task_queue, "next", request_id="r2")

    assert (result.status, result.answer) == ("completed", "whole")
    assert [one.text for one in details(file_store, result).aborted_partials] == ["half an answer"]
    assert after.status == "completed"
    assert_sendable(model.requests[-1].messages)
    assert [message.text for message in model.requests[-1].messages] == ["go", "whole", "next"]


async def test_a_response_that_cannot_be_stored_is_asked_for_again(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    poisons: list[Any] = [object(), b"\xff", {1, 2}, float("nan"), {1: 2}]
    broken = [
        ModelResponse(parts=(ThinkingPart(provider_data={"signature": poison}),))
        for poison in poisons
    ]

    await assert_asked_again(running, client, task_queue, file_store, broken)


async def test_text_that_no_database_holds_is_replaced(
    running: Any, client: Client, task_queue: str
) -> None:
    async def stream(_: Any, sink: Any) -> ModelResponse:
        await sink.text("a\ud800")
        await sink.text("b\x00")
        return text("a\ud800b\x00")

    desk = Desk(stream)
    async with running(desk.app):
        result = await run_turn(client, task_queue)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    assert (result.status, result.answer) == ("completed", "a�b␀")


async def test_a_step_may_have_128_calls(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    desk = Desk(calls(*(call("note", item=item) for item in range(128))), text("done"))
    async with running(desk.app):
        result = await asyncio.wait_for(run_turn(client, task_queue), 60)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    assert result.answer == "done"
    assert desk.effects == dict.fromkeys(range(128), 1)
    told = desk.model.requests[1].messages[-1].results
    assert [part.text for part in told] == [f"noted {item}" for item in range(128)]


async def test_the_129th_call_of_a_step_is_not_executed(
    running: Any, client: Client, task_queue: str, file_store: Store
) -> None:
    desk = Desk(calls(*(call("note", item=item) for item in range(129))), text("done"))
    async with running(desk.app):
        result = await asyncio.wait_for(run_turn(client, task_queue), 60)
        await assert_next_turn_is_valid(client, task_queue, desk.model)

    assert result.answer == "done"
    assert desk.effects == dict.fromkeys(range(128), 1)
    told = desk.model.requests[1].messages[-1].results
    assert len(told) == 129
    assert [part.is_error for part in told] == [False] * 128 + [True]
    last = operations(file_store, result)[-1]
    assert (last.status, last.reason, last.generations) == ("refused", "too_many_calls", ())
