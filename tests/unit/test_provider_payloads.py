"""Real models on recorded payload shapes: what is sent, and what is read from a whole answer."""

from typing import Any

import pytest
from harness.provider_server import (
    CLAUDE_START,
    CLAUDE_THINKS_AND_CALLS,
    SPOKEN,
    CannedServer,
    Heard,
    Reply,
    asking,
    chat_chunk,
    chat_usage,
    claude_block,
    claude_end,
    openai_stream,
    responses_stream,
    typed_stream,
)

from perdure.activities.providers import resolve_model
from perdure.contracts.messages import (
    MediaPart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    user_message,
)
from perdure.contracts.model import FinishReason, ModelResponse, Usage
from perdure.contracts.tools import ToolSpec

pytestmark = pytest.mark.slow

OPERATION = "toolop_" + "a" * 32
LOOK = ToolSpec(
    name="look",
    description="Look at a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


async def answer_of(
    server: CannedServer, protocol: str, heard: Heard | None = None, /, **request: Any
) -> ModelResponse:
    """Ask once, with an endpoint of that protocol."""
    model = resolve_model("mine:any", {"mine": server.endpoint(protocol, api_key="k")})
    messages = request.pop("messages", ())
    return await model.respond(asking("mine:any", *messages, **request), heard or Heard())


def stored(response: ModelResponse) -> tuple[Part, ...]:
    """The parts as the engine stores them: each call under its operation's id."""
    return tuple(
        part.model_copy(update={"call_id": OPERATION}) if isinstance(part, ToolCallPart) else part
        for part in response.parts
    )


def after_the_call(response: ModelResponse, **result: Any) -> tuple[Message, ...]:
    """The conversation with that answer and its call's result."""
    outcome = ToolResultPart(call_id=OPERATION, name="look", text="sunny", **result)
    return (
        user_message("hello"),
        Message(role=Role.ASSISTANT, parts=stored(response)),
        Message(role=Role.TOOL, parts=(outcome,)),
    )


async def test_a_chat_answer_streams_and_its_cached_tokens_are_counted_apart() -> None:
    heard = Heard()
    async with CannedServer(SPOKEN) as server:
        response = await answer_of(server, "openai", heard)

    assert heard.said == ["Hel", "lo."]
    assert response.parts == (TextPart(text="Hello."),)
    assert response.finish_reason is FinishReason.STOP
    assert response.usage == Usage(input_tokens=176, output_tokens=5, cached_tokens=1024)
    assert response.model == "gpt-4o-2024-08-06"
    assert response.response_id == "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT"


async def test_parallel_calls_of_a_chat_answer_keep_their_order_and_raw_text() -> None:
    calls = openai_stream(
        chat_chunk({"role": "assistant", "content": None}),
        chat_chunk(_call(0, "call_1", "look", "")),
        chat_chunk(_call(0, None, None, '{"city": "Par')),
        chat_chunk(_call(0, None, None, 'is"}')),
        chat_chunk(_call(1, "call_1", "look", '{"city": ')),
        chat_chunk(_call(2, "call_2", "look", "[1]")),
        chat_chunk(_call(3, "call_3", "look", "")),
        chat_chunk({}, "tool_calls"),
        chat_usage(10, 20, 0),
    )
    async with CannedServer(calls) as server:
        response = await answer_of(server, "openai", tools=(LOOK,))

    found = [(part.arguments, part.arguments_text) for part in response.parts if _is_call(part)]
    assert found == [({"city": "Paris"}, None), ({}, '{"city": '), ({}, "[1]"), ({}, None)]
    assert response.finish_reason is FinishReason.TOOL_CALLS


def _call(index: int, call_id: str | None, name: str | None, args: str) -> dict[str, Any]:
    call: dict[str, Any] = {"index": index, "function": {"arguments": args}}
    if call_id is not None:
        call |= {"id": call_id, "type": "function"}
        call["function"]["name"] = name
    return {"tool_calls": [call]}


def _is_call(part: Part) -> Any:
    return isinstance(part, ToolCallPart)


async def test_claude_gets_its_thinking_back_with_signatures_and_results_right_after() -> None:
    heard = Heard()
    async with CannedServer(CLAUDE_THINKS_AND_CALLS) as server:
        response = await answer_of(server, "anthropic", heard, tools=(LOOK,))
        messages = after_the_call(response, is_error=True)
        await answer_of(server, "anthropic", tools=(LOOK,), messages=messages)

    assert heard.thought == ["Look ", "first."]
    assert response.usage == Usage(input_tokens=140, output_tokens=50, cached_tokens=900)
    _, assistant, results = server.asked[1].body["messages"]
    assert [block["type"] for block in assistant["content"]] == [
        "thinking",
        "redacted_thinking",
        "text",
        "tool_use",
    ]
    assert assistant["content"][0]["signature"] == "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"
    assert assistant["content"][1]["data"] == "EmwKAhgBEgy3va3pzix"
    assert assistant["content"][3]["id"] == OPERATION
    assert assistant["content"][3]["input"] == {"city": "Paris"}
    assert results["content"][0]["tool_use_id"] == OPERATION
    assert results["content"][0]["is_error"] is True


async def test_thinking_is_not_shown_to_another_provider() -> None:
    async with CannedServer(CLAUDE_THINKS_AND_CALLS) as claude, CannedServer(SPOKEN) as other:
        response = await answer_of(claude, "anthropic", tools=(LOOK,))
        model = resolve_model("other:any", {"other": other.endpoint("openai")})
        await model.respond(asking("other:any", *after_the_call(response)), Heard())

    sent = other.asked[0].body["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert "Look first." not in str(sent)
    assert sent[1]["content"] == "One moment."
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == OPERATION
    assert len(OPERATION) <= 40, "the chat API takes no longer id"


async def test_the_responses_api_gets_its_reasoning_and_ids_back_and_stores_nothing() -> None:
    async with CannedServer(responses_stream("completed")) as server:
        response = await answer_of(server, "openai-responses", tools=(LOOK,))
        await _with_encrypted_reasoning(server, after_the_call(response))

    assert response.usage == Usage(input_tokens=400, output_tokens=80, cached_tokens=600)
    thinking, text, call = response.parts
    assert isinstance(thinking, ThinkingPart)
    assert text == TextPart(text="One moment.")
    assert isinstance(call, ToolCallPart)
    assert call.provider_call_id == "call_unLAR8MvFNptuiZK6K6HCy5k"
    sent = server.asked[1].body
    assert sent["store"] is False
    _, reasoning, message, asked, result = sent["input"]
    assert (reasoning["id"], reasoning["encrypted_content"]) == ("rs_67cf2f48", "gAAA")
    assert (message["id"], message["content"][0]["text"]) == ("msg_67cf2f49", "One moment.")
    assert (asked["id"], asked["call_id"]) == ("fc_67cf2f50", OPERATION)
    assert (result["call_id"], result["output"]) == (OPERATION, "sunny")


async def _with_encrypted_reasoning(server: CannedServer, messages: tuple[Message, ...]) -> None:
    # Reasoning models are known by name.
    model = resolve_model("mine:gpt-5", {"mine": server.endpoint("openai-responses")})
    await model.respond(asking("mine:gpt-5", *messages, tools=(LOOK,)), Heard())


async def test_a_result_that_is_an_error_is_told_as_one_where_there_is_no_flag_for_it() -> None:
    call = ModelResponse(parts=(ToolCallPart(name="look", arguments={"city": "Paris"}),))
    async with CannedServer(SPOKEN) as server:
        await answer_of(server, "openai", messages=after_the_call(call, is_error=True))

    assert server.asked[0].body["messages"][2]["content"] == '{"error":"sunny"}'


async def test_images_and_files_go_by_url() -> None:
    image = MediaPart(url="https://example.com/cat.png", media_type="image/png")
    pdf = MediaPart(url="https://example.com/a.pdf", media_type="application/pdf")
    said = claude_block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "A cat."})
    claude = typed_stream(CLAUDE_START, *said, *claude_end("end_turn"))
    look = Message(role=Role.USER, parts=(TextPart(text="What?"), image))
    read = Message(role=Role.USER, parts=(image, pdf))
    async with CannedServer(SPOKEN, claude, responses_stream("completed")) as server:
        await answer_of(server, "openai", messages=(look,))
        await answer_of(server, "anthropic", messages=(read,))
        await answer_of(server, "openai-responses", messages=(read,))

    chat, messages, responses = (asked.body for asked in server.asked)
    assert chat["messages"][0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
    ]
    assert [block["source"] for block in messages["messages"][0]["content"]] == [
        {"type": "url", "url": "https://example.com/cat.png"},
        {"type": "url", "url": "https://example.com/a.pdf"},
    ]
    assert responses["input"][0]["content"] == [
        {"type": "input_image", "image_url": "https://example.com/cat.png", "detail": "auto"},
        {"type": "input_file", "file_url": "https://example.com/a.pdf"},
    ]


async def test_settings_instructions_and_tools_are_sent_in_the_providers_words() -> None:
    parameters = {"temperature": 0.25, "max_tokens": 99, "stop_sequences": ["END"]}
    async with CannedServer(SPOKEN, CLAUDE_THINKS_AND_CALLS) as server:
        for protocol in ("openai", "anthropic"):
            await answer_of(
                server, protocol, instructions="Be brief.", tools=(LOOK,), parameters=parameters
            )

    chat, claude = (asked.body for asked in server.asked)
    assert (chat["temperature"], chat["max_completion_tokens"]) == (0.25, 99)
    assert chat["stop"] == ["END"]
    assert chat["messages"][0] == {"role": "system", "content": "Be brief."}
    assert chat["tools"][0]["function"]["name"] == "look"
    assert chat["tools"][0]["function"]["parameters"]["required"] == ["city"]
    assert (claude["temperature"], claude["max_tokens"]) == (0.25, 99)
    assert claude["stop_sequences"] == ["END"]
    assert claude["system"][0]["text"] == "Be brief."
    assert claude["tools"][0]["input_schema"]["required"] == ["city"]


async def test_the_schema_of_an_answer_is_enforced_or_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    async with CannedServer(SPOKEN, CLAUDE_THINKS_AND_CALLS) as server:
        await answer_of(server, "openai", output_schema=schema)
        # A model of that name is not known to enforce schemas.
        await answer_of(server, "anthropic", output_schema=schema, instructions="Be brief.")

    enforced = server.asked[0].body["response_format"]["json_schema"]["schema"]
    assert enforced["required"] == ["a"]
    told = str(server.asked[1].body["system"])
    assert "Be brief." in told
    assert '"required":["a"]' in told


async def test_a_marker_of_an_earlier_turn_is_told_before_the_new_message() -> None:
    async with CannedServer(SPOKEN) as server:
        await answer_of(server, "openai", messages=(user_message("it failed"), user_message("go")))

    said = [message["content"] for message in server.asked[0].body["messages"]]
    assert said == ["it failed", "go"]


async def test_an_answer_that_reached_its_length_is_passed_on() -> None:
    cut_short = openai_stream(chat_chunk({"content": "Hel"}), chat_chunk({}, "length"))
    async with CannedServer(cut_short) as server:
        response = await answer_of(server, "openai")

    assert response.finish_reason is FinishReason.LENGTH
    assert response.parts == (TextPart(text="Hel"),)


async def test_reasoning_beside_a_chat_answer_is_thinking() -> None:
    reasoned = openai_stream(
        chat_chunk({"role": "assistant", "reasoning_content": "Let me see."}),
        chat_chunk({"content": "Yes."}),
        chat_chunk({}, "stop"),
        chat_usage(4, 4, 0),
    )
    heard = Heard()
    async with CannedServer(Reply(reasoned)) as server:
        response = await answer_of(server, "openai", heard)

    assert heard.thought == ["Let me see."]
    assert [type(part) for part in response.parts] == [ThinkingPart, TextPart]
