"""What goes wrong with a provider, and which error of ours it is: status, retry, and no secret."""

import json
import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
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
    claude_block,
    claude_end,
    openai_stream,
    responses_stream,
    typed_stream,
)

from perdure.activities.providers import resolve_model
from perdure.agents import Endpoint
from perdure.contracts.errors import (
    ModelContentRefused,
    ModelContextOverflow,
    ModelCredentialsRefused,
    ModelError,
    ModelProtocolError,
    ModelRateLimited,
    ModelRefused,
    ModelUnavailable,
    ModelUnknown,
)
from perdure.contracts.messages import user_message

pytestmark = pytest.mark.slow

PRIVATE = "the prompt said hunter2"


async def error_of(
    reply: Reply | bytes, protocol: str = "openai", heard: Heard | None = None, /, **request: Any
) -> ModelError:
    """The error of one call; the provider was asked at most once."""
    async with CannedServer(reply) as server:
        model = resolve_model("mine:any", {"mine": server.endpoint(protocol, api_key="k")})
        with pytest.raises(ModelError) as caught:
            await model.respond(asking("mine:any", **request), heard or Heard())
        assert len(server.asked) <= 1
    assert PRIVATE not in str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value


def refusal(status: int, protocol: str, **changes: Any) -> Reply:
    """An error body as the provider writes it."""
    error = {"message": PRIVATE, "type": "invalid_request_error", "code": None, "param": None}
    body = {"error": error | changes}
    headers = changes.pop("headers", {})
    body["error"].pop("headers", None)
    if protocol == "anthropic":
        body = {"type": "error", **body, "request_id": "req_011"}
    return Reply(json.dumps(body).encode(), status, "application/json", headers)


@pytest.mark.parametrize("protocol", ["openai", "openai-responses", "anthropic"])
@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, ModelRefused, False),
        (401, ModelCredentialsRefused, False),
        (403, ModelCredentialsRefused, False),
        (404, ModelUnknown, False),
        (408, ModelUnavailable, True),
        (409, ModelUnavailable, True),
        (413, ModelContextOverflow, False),
        (422, ModelRefused, False),
        (429, ModelRateLimited, True),
        (500, ModelUnavailable, True),
        (502, ModelUnavailable, True),
        (503, ModelUnavailable, True),
        (529, ModelUnavailable, True),
    ],
)
async def test_a_status_says_what_is_wrong_and_whether_to_try_again(
    protocol: str, status: int, kind: type[ModelError], retryable: bool
) -> None:
    error = await error_of(refusal(status, protocol), protocol)

    assert type(error) is kind
    assert error.retryable is retryable


@pytest.mark.parametrize(
    ("protocol", "status", "changes", "kind"),
    [
        ("openai", 400, {"code": "context_length_exceeded"}, ModelContextOverflow),
        ("openai-responses", 400, {"code": "context_length_exceeded"}, ModelContextOverflow),
        (
            "anthropic",
            400,
            {"message": "prompt is too long: 250000 tokens > 200000 maximum"},
            ModelContextOverflow,
        ),
        ("openai", 400, {"code": "content_policy_violation"}, ModelContentRefused),
        ("openai", 429, {"code": "insufficient_quota"}, ModelRateLimited),
        ("anthropic", 400, {"message": "Your credit balance is too low"}, ModelRateLimited),
    ],
)
async def test_a_code_says_more_than_its_status(
    protocol: str, status: int, changes: dict[str, Any], kind: type[ModelError]
) -> None:
    error = await error_of(refusal(status, protocol, **changes), protocol)

    assert type(error) is kind
    assert error.retryable is False


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_the_wait_that_a_provider_asks_for_is_kept(
    status: int, headers: dict[str, str], wait_s: float | None
) -> None:
    error = await error_of(refusal(status, "openai", headers=headers))

    assert error.retry_after_s == wait_s


async def test_the_wait_may_be_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)

    error = await error_of(refusal(429, "anthropic", headers={"retry-after": later}), "anthropic")

    assert error.retry_after_s is not None
    assert 60 < error.retry_after_s <= 91


PAGE = Reply(b"<html><body>hunter2</body></html>", content_type="text/html; charset=utf-8")
NO_STREAM = Reply(b'{"choices": []}', content_type="application/json")


@pytest.mark.parametrize("protocol", ["openai", "openai-responses", "anthropic"])
@pytest.mark.parametrize("reply", [PAGE, NO_STREAM, Reply(b"")])
async def test_a_200_that_is_no_stream_is_no_answer(protocol: str, reply: Reply) -> None:
    error = await error_of(reply, protocol)

    assert type(error) is ModelProtocolError


def claude_without(last: int) -> bytes:
    """A message of Anthropic's whose last events are missing."""
    said = claude_block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Hel"})
    return typed_stream(*[CLAUDE_START, *said, *claude_end("end_turn")][:-last])


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("openai", openai_stream(chat_chunk({"content": "Hel"}))),
        ("openai", openai_stream(chat_chunk({"content": "Hel"}), done=False)),
        ("openai-responses", responses_stream("")),
        ("anthropic", claude_without(1)),
        ("anthropic", claude_without(2)),
    ],
)
async def test_a_stream_without_its_end_is_no_answer_though_its_text_was_heard(
    protocol: str, body: bytes
) -> None:
    heard = Heard()

    error = await error_of(body, protocol, heard)

    assert type(error) is ModelProtocolError
    assert error.retryable
    assert heard.said


MALFORMED = [
    b'data: {"id": "chatcmpl-1", "choi\n\n',
    b"data: [1]\n\n",
    b"data: nothing\n\n",
    b"not an event at all\n\n",
]


@pytest.mark.parametrize("chunk", MALFORMED)
async def test_a_malformed_chunk_ends_the_answer(chunk: bytes) -> None:
    heard = Heard()
    first, rest = SPOKEN.split(b"\n\n", 1)

    error = await error_of(first + b"\n\n" + chunk + rest, "openai", heard)

    assert type(error) is ModelProtocolError
    assert heard.said == []


@pytest.mark.parametrize("chunk", [*MALFORMED, b'event: content_block_delta\ndata: {"ty\n\n'])
async def test_a_malformed_chunk_is_not_skipped_where_the_client_would(chunk: bytes) -> None:
    first, rest = CLAUDE_THINKS_AND_CALLS.split(b"\n\n", 1)

    error = await error_of(first + b"\n\n" + chunk + rest, "anthropic")

    assert type(error) is ModelProtocolError


@pytest.mark.parametrize("protocol", ["openai", "openai-responses", "anthropic"])
async def test_a_connection_that_closes_in_a_chunk_is_tried_again(protocol: str) -> None:
    body = {
        "openai": SPOKEN,
        "anthropic": CLAUDE_THINKS_AND_CALLS,
        "openai-responses": responses_stream("completed"),
    }[protocol]

    error = await error_of(Reply(body, cut=True), protocol)

    assert type(error) is ModelUnavailable
    assert error.retryable


async def test_an_endpoint_that_is_down_is_tried_again() -> None:
    async with CannedServer(SPOKEN) as server:
        gone = server.endpoint("openai")
    model = resolve_model("mine:any", {"mine": gone})

    with pytest.raises(ModelUnavailable) as caught:
        await model.respond(asking("mine:any"), Heard())

    assert caught.value.retryable


async def test_two_choices_are_never_mixed_into_one_answer() -> None:
    first = chat_chunk({"content": "one"})
    two = openai_stream(first, chat_chunk({"content": "two"}, index=1), chat_chunk({}, "stop"))
    heard = Heard()

    error = await error_of(two, "openai", heard)

    assert type(error) is ModelProtocolError
    assert not error.retryable
    assert "two" not in "".join(heard.said)


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("openai", openai_stream(chat_chunk({"content": "b"}), chat_chunk({}, "content_filter"))),
        ("openai", openai_stream(chat_chunk({"refusal": "No."}), chat_chunk({}, "stop"))),
        ("anthropic", typed_stream(CLAUDE_START, *claude_end("refusal"))),
        (
            "openai-responses",
            responses_stream("incomplete", incomplete_details={"reason": "content_filter"}),
        ),
    ],
)
async def test_a_filtered_answer_is_refused_content(protocol: str, body: bytes) -> None:
    error = await error_of(body, protocol)

    assert type(error) is ModelContentRefused
    assert not error.retryable


OVERLOADED = {"type": "overloaded_error", "message": PRIVATE}
FAILED = {"code": "server_error", "message": PRIVATE}


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("openai", openai_stream(chat_chunk({"content": "b"}), {"error": FAILED})),
        ("openai-responses", responses_stream("failed", error=FAILED)),
        ("anthropic", typed_stream(CLAUDE_START, {"type": "error", "error": OVERLOADED})),
    ],
)
async def test_an_error_in_a_stream_is_the_error_it_names(protocol: str, body: bytes) -> None:
    error = await error_of(body, protocol)

    assert type(error) is ModelUnavailable


async def test_a_redirect_is_not_followed_with_a_key() -> None:
    async with CannedServer(SPOKEN) as elsewhere:
        moved = Reply(status=307, headers={"location": f"{elsewhere.url}/v1/chat/completions"})

        error = await error_of(moved)

        assert type(error) is ModelRefused
        assert elsewhere.asked == []


@pytest.mark.parametrize(
    "name", ["nope", "timeout", "max_retries", "extra_headers", "anthropic_thinking", "top_k"]
)
async def test_a_parameter_that_the_model_does_not_take_is_refused_before_the_call(
    name: str,
) -> None:
    async with CannedServer(SPOKEN) as server:
        model = resolve_model("mine:any", {"mine": server.endpoint("openai")})

        with pytest.raises(ModelRefused, match=name):
            await model.respond(asking("mine:any", parameters={name: 1}), Heard())

        assert server.asked == []


async def test_a_missing_key_fails_the_call_and_says_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    for spec in ("openai:gpt-5", "openai-chat:gpt-4o", "anthropic:claude-opus-4-6"):
        with pytest.raises(ModelCredentialsRefused, match=r"Endpoint\(api_key=") as caught:
            await resolve_model(spec).respond(asking(spec), Heard())
        assert not caught.value.retryable


@pytest.mark.parametrize("endpoint", [None, "api_key", "base_url"])
async def test_a_provider_takes_key_and_address_from_the_environment_or_its_endpoint(
    endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CannedServer(SPOKEN) as server, CannedServer(SPOKEN) as other:
        monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        replaced = {
            None: {},
            "api_key": {"openai-chat": Endpoint(api_key="mine", headers={"x-team": "a"})},
            "base_url": {"openai-chat": Endpoint(base_url=f"{other.url}/v1")},
        }[endpoint]

        await resolve_model("openai-chat:gpt-4o", replaced).respond(asking("any"), Heard())

        (asked,) = server.asked or other.asked
        assert bool(other.asked) is (endpoint == "base_url")
        key = "mine" if endpoint == "api_key" else "of-the-environment"
        assert asked.headers["authorization"] == f"Bearer {key}"
        assert asked.headers.get("x-team") == ("a" if endpoint == "api_key" else None)


@pytest.mark.parametrize("protocol", ["openai", "openai-responses", "anthropic"])
async def test_no_key_of_the_environment_reaches_a_server_of_ones_own(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    async with CannedServer(Reply(b"", 500)) as server:
        model = resolve_model("mine:any", {"mine": server.endpoint(protocol)})

        with pytest.raises(ModelUnavailable):
            await model.respond(asking("mine:any"), Heard())

        assert "hunter2" not in str(server.asked)


@pytest.mark.parametrize("protocol", ["openai", "openai-responses", "anthropic"])
async def test_no_prompt_and_no_key_is_logged_even_at_the_lowest_level(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with CannedServer(Reply(b"", 500)) as server:
        model = resolve_model("mine:any", {"mine": server.endpoint(protocol, api_key="k-hunter2")})

        with pytest.raises(ModelUnavailable):
            await model.respond(asking("mine:any", user_message(PRIVATE)), Heard())

    assert "hunter2" in str(server.asked)
    assert "hunter2" not in caplog.text
