"""Metrics, traces and health of real workers; and that none of them can disturb a turn."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.canary_app import CANARIES, MESSAGE
from harness.collector import Collector, values_of
from harness.pages import get, ports
from harness.processes import WorkerProcess, until
from harness.turns import Answers, begin, call, calls, request, run_turn, start_raw, text
from temporalio.client import Client

from perdure import Agent, App, ReplaySafety, ToolContext, tool
from perdure.cli.dev_server import DevServer
from perdure.contracts.errors import ToolError
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.model import ModelResponse, Usage
from perdure.contracts.turn import TurnResult
from perdure.settings import Settings
from perdure.worker import FLUSH_S

pytestmark = [pytest.mark.server, pytest.mark.slow]

STEADY: dict[str, Any] = {"heartbeat_timeout_s": 5.0, "grace_s": 2.0, "cancel_grace_s": 1.0}
SECRET = "canary-of-observability"


@tool(replay=ReplaySafety.SAFE)
async def find(what: str) -> str:
    """Find something."""
    return f"found {what}"


@tool
async def fail(what: str) -> str:
    """Raise."""
    raise ValueError(SECRET)


def used(response: ModelResponse, **tokens: int) -> ModelResponse:
    """A response that has cost something."""
    return response.model_copy(update={"usage": Usage(**tokens), "model": "answers-2"})


def desk() -> App:
    """One turn with two tools and two answers."""
    asks = calls(call("find", what=SECRET), call("fail", what=SECRET))
    model = Answers(
        used(asks, input_tokens=10, output_tokens=5, cached_tokens=4),
        used(text(f"said {SECRET}"), input_tokens=20, output_tokens=7),
    )
    return App([Agent("desk", model, f"Keep {SECRET}.", [find, fail])])


async def metrics(port: int) -> dict[str, float]:
    """All samples of our metrics, by their name with labels in alphabetic order."""
    status, page = await get(port, "/metrics")
    assert status == 200
    lines = (line.rpartition(" ") for line in page.splitlines() if line.startswith("perdure_"))
    return {name: float(value) for name, _, value in lines}


async def counted(port: int, sample: str) -> dict[str, float]:
    """The metrics, once that sample is there and over zero: turns are counted behind their end."""
    async with asyncio.timeout(20):
        while not (found := await metrics(port)).get(sample):
            await asyncio.sleep(0.02)
    return found


TURNS = 'perdure_turns_total{agent="desk",status="completed",stop_reason="answered"}'


async def test_the_metrics_of_a_turn_with_tools_are_what_happened(
    client: Client, task_queue: str, running: Callable[..., Any]
) -> None:
    (port,) = ports(1)
    async with running(desk(), Settings(**STEADY, metrics_port=port)):
        await run_turn(client, task_queue)
        found = await counted(port, TURNS)
        _, page = await get(port, "/metrics")

    tokens = 'perdure_model_tokens_total{agent="desk",direction="%s",model="answers"}'
    tools = 'perdure_tool_seconds_count{safety="%s",status="%s",tool="%s"}'
    assert found[TURNS] == 1
    assert [found[tokens % name] for name in ("input", "output", "cached")] == [30, 12, 4]
    assert found[tools % ("safe", "ok", "find")] == 1
    assert found[tools % ("unsafe", "error", "fail")] == 1
    assert found['perdure_model_seconds_count{agent="desk",model="answers",outcome="ok"}'] == 2
    for command, count in (("prepare_step", 2), ("dispatch_call", 2), ("settle_call", 2)):
        assert found[f'perdure_store_seconds_count{{command="{command}"}}'] == count
    recovered = {
        name: n for name, n in found.items() if name.startswith("perdure_recoveries_total")
    }
    assert len(recovered) == 7
    assert set(recovered.values()) == {0}
    # No label may come from a caller: neither ids nor texts are there.
    assert not re.search(rf"{SECRET}|turn_[0-9a-f]|toolop_|\bc1\b|\br1\b", page)


async def test_a_turn_is_one_trace_without_content(
    client: Client,
    task_queue: str,
    running: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with running(desk(), Settings(**STEADY)):
            result = await run_turn(client, task_queue)

        (turn,) = collector.named("invoke_agent desk")
        first, second = collector.named("chat answers")
        (found,) = collector.named("execute_tool find")
        (failed,) = collector.named("execute_tool fail")

    assert collector.services == {"perdure"}
    assert len(collector.spans) == 5
    assert {span.trace_id.hex() for span in collector.spans} == {result.turn_id[5:]}
    assert turn.parent_span_id == b""
    assert {span.parent_span_id for span in (first, second, found, failed)} == {turn.span_id}
    assert turn.start_time_unix_nano <= first.start_time_unix_nano
    assert second.end_time_unix_nano <= turn.end_time_unix_nano + 10**9
    ids = {"gen_ai.conversation.id": "c1", "gen_ai.agent.name": "desk"}
    ours = {"perdure.turn.id": result.turn_id, "perdure.namespace": "default", "perdure.step": 1}
    assert values_of(first) == ids | ours | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "custom",
        "gen_ai.request.model": "answers",
        "gen_ai.response.model": "answers-2",
        "gen_ai.response.finish_reasons": ["tool_calls"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "perdure.attempt": 1,
    }
    assert values_of(found) == ids | ours | {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "find",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": derive_operation_id(result.turn_id, 1, 0),
        "perdure.tool.generation": 1,
        "perdure.tool.replay_safety": "safe",
        "perdure.tool.status": "ok",
    }
    assert values_of(failed)["error.type"] == values_of(failed)["perdure.tool.status"] == "error"
    assert values_of(turn)["perdure.turn.stop_reason"] == "answered"
    assert values_of(turn)["gen_ai.usage.output_tokens"] == 12
    assert SECRET.encode() not in b"".join(collector.bodies)


async def test_content_is_sent_where_it_was_asked_for(
    client: Client,
    task_queue: str,
    running: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        settings = Settings(**STEADY, otel="on", otel_content=True)
        async with running(desk(), settings):
            await run_turn(client, task_queue, "where is it?")
        second = values_of(collector.named("chat answers")[1])
        found = values_of(collector.named("execute_tool find")[0])

    roles = [message["role"] for message in json.loads(second["gen_ai.input.messages"])]
    assert roles == ["user", "assistant", "tool", "tool"] or roles == ["user", "assistant", "tool"]
    assert SECRET in second["gen_ai.system_instructions"]
    (said,) = json.loads(second["gen_ai.output.messages"])
    assert said["parts"] == [{"type": "text", "content": f"said {SECRET}"}]
    assert said["finish_reason"] == "stop"
    assert json.loads(found["gen_ai.tool.call.arguments"]) == {"what": SECRET}
    assert found["gen_ai.tool.call.result"] == f"found {SECRET}"


async def test_a_sampler_decides_for_whole_turns(
    client: Client,
    task_queue: str,
    running: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
        model = Answers(text("once"))
        async with running(App([Agent("desk", model, "", [])]), Settings(**STEADY)):
            # Ids are derived, so these turns are the same in every run.
            for number in range(8):
                await run_turn(
                    client, task_queue, conversation_id=f"sampled-{number}", request_id="r1"
                )

    traces: dict[bytes, int] = {}
    for span in collector.spans:
        traces[span.trace_id] = traces.get(span.trace_id, 0) + 1
    assert 0 < len(traces) < 8
    assert set(traces.values()) == {2}


@asynccontextmanager
async def closed_port() -> AsyncGenerator[dict[str, str]]:
    """A collector that is down."""
    (port,) = ports(1)
    yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}


@asynccontextmanager
async def hanging() -> AsyncGenerator[dict[str, str]]:
    """A collector that takes everything and never answers."""
    with Collector(hanging=True) as collector:
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}


@asynccontextmanager
async def taken() -> AsyncGenerator[dict[str, str]]:
    """Every port of ours is somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        yield {"PERDURE_METRICS_PORT": port, "PERDURE_HEALTH_PORT": port}


@pytest.mark.parametrize("trouble", [closed_port, hanging, taken])
async def test_a_dependency_of_observability_that_is_lost_changes_nothing_for_turns(
    client: Client,
    task_queue: str,
    running: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[], Any],
) -> None:
    async with running(desk(), Settings(**STEADY)):
        plain = await run_turn(client, task_queue, request_id="plain", conversation_id="plain")
    async with trouble() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        async with running(desk(), Settings(**STEADY)):
            result = await run_turn(client, task_queue)
            again = await run_turn(client, task_queue, "more", conversation_id="c2")
            stopping_s = time.monotonic()
        stopped_s = time.monotonic() - stopping_s

    def seen(ended: TurnResult) -> dict[str, Any]:
        return ended.model_dump(exclude={"turn_id", "request_digest"})

    assert seen(result) == seen(again) == seen(plain)
    assert result.answer == f"said {SECRET}"
    assert stopped_s < FLUSH_S + 4
    assert SECRET not in caplog.text
    if trouble is taken:
        assert "cannot be served" in caplog.text


async def test_a_worker_whose_temporal_metrics_port_is_taken_runs_turns(
    client: Client, server: DevServer, task_queue: str, tmp_path: Path
) -> None:
    (free,) = ports(1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken_port = other.getsockname()[1]
        for port in (taken_port, free):
            environment = {"PERDURE_TEMPORAL_METRICS_PORT": str(port)}
            async with WorkerProcess(
                tmp_path, address=server.address, task_queue=task_queue, **environment
            ) as worker:
                result = await run_turn(
                    client, task_queue, "use look", agent="fault", request_id=f"r{port}"
                )
                assert result.answer == "done: seen"
                if port == free:
                    status, page = await get(port, "/metrics")
                    assert status == 200
                    assert "temporal_workflow_completed_total" in page
                else:
                    assert "cannot serve Temporal's metrics" in worker.log


async def test_a_rerun_after_a_killed_worker_is_counted_and_logged(
    client: Client, server: DevServer, task_queue: str, tmp_path: Path
) -> None:
    (port,) = ports(1)
    first = WorkerProcess(
        tmp_path, address=server.address, task_queue=task_queue, PERDURE_FAULT_HOLD="look,send"
    )
    async with first:
        handles = [
            await begin(client, task_queue, f"use {name}", agent="fault", conversation_id=name)
            for name in ("look", "send")
        ]
        await until(lambda: all((tmp_path / f"holding.{x}").exists() for x in ("look", "send")))
        first.kill()
    environment = {"PERDURE_METRICS_PORT": str(port), "PERDURE_LOG_FORMAT": "json"}
    async with WorkerProcess(
        tmp_path, address=server.address, task_queue=task_queue, **environment
    ) as second:
        results = [await asyncio.wait_for(handle.wait(), 45) for handle in handles]
        recovered = 'perdure_recoveries_total{kind="%s"}'
        await counted(port, recovered % "rerun")
        found = await counted(port, recovered % "interrupted")
        lines = [json.loads(line) for line in second.log.splitlines()]

    kinds = ("worker_lost", "rerun", "interrupted", "settled", "late_result")
    assert [found[recovered % kind] for kind in kinds] == [2, 1, 1, 0, 0]
    reruns = [line for line in lines if line["message"] == "recovery: rerun"]
    (rerun,) = reruns
    assert rerun["turn"] == results[0].turn_id
    assert rerun["operation"] == derive_operation_id(results[0].turn_id, 1, 0)
    assert (rerun["step"], rerun["attempt"]) == (1, 2)


async def test_a_zombies_result_is_counted_as_late(
    client: Client, server: DevServer, task_queue: str, tmp_path: Path
) -> None:
    (port,) = ports(1)
    zombie = WorkerProcess(
        tmp_path,
        address=server.address,
        task_queue=task_queue,
        PERDURE_FAULT_HOLD="send",
        PERDURE_METRICS_PORT=str(port),
    )
    async with zombie:
        handle = await begin(client, task_queue, "use send", agent="fault")
        await until(lambda: (tmp_path / "holding.send").exists())
        zombie.freeze()
        async with WorkerProcess(tmp_path, address=server.address, task_queue=task_queue):
            await asyncio.wait_for(handle.wait(), 45)
            (tmp_path / "release").touch()
            zombie.thaw()
            found = await counted(port, 'perdure_recoveries_total{kind="late_result"}')

    assert found['perdure_tool_seconds_count{safety="unsafe",status="ok",tool="send"}'] == 1


async def test_what_a_turn_recovers_from_by_itself_is_counted(
    client: Client, task_queue: str, running: Callable[..., Any]
) -> None:
    @tool(replay=ReplaySafety.RECONCILED)
    async def ship() -> str:
        """Break behind the effect."""
        raise RuntimeError(SECRET)

    @ship.reconcile
    async def shipped() -> object:
        """It was done."""
        return "shipped"

    @tool(timeout_s=0.1)
    async def send() -> str:
        """Take too long."""
        await asyncio.Event().wait()
        return "never"

    @tool(replay=ReplaySafety.SAFE)
    async def flaky(ctx: ToolContext) -> str:
        """Report an error once, which is no recovery."""
        if ctx.generation == 1:
            raise ToolError("not yet", retry_after_s=0.01)
        return "now"

    tools = [ship, send, flaky]
    model = Answers(calls(*(call(item.name) for item in tools)), text("done"))
    (port,) = ports(1)
    app = App([Agent("desk", model, "", tools)])
    async with running(app, Settings(**STEADY, metrics_port=port)):
        await run_turn(client, task_queue)
        found = await counted(port, TURNS)

    sample = 'perdure_tool_seconds_count{safety="%s",status="%s",tool="%s"}'
    assert found[sample % ("reconciled", "reconcile", "ship")] == 1
    assert found[sample % ("unsafe", "timed_out", "send")] == 1
    assert found[sample % ("safe", "retry", "flaky")] == 1
    assert found[sample % ("safe", "ok", "flaky")] == 1
    counts = {name: n for name, n in found.items() if "recoveries_total" in name and n}
    assert counts == {
        'perdure_recoveries_total{kind="settled"}': 1,
        'perdure_recoveries_total{kind="interrupted"}': 1,
    }


async def test_a_turn_that_another_workflow_takes_over_is_counted(
    client: Client, task_queue: str, running: Callable[..., Any]
) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    @tool(replay=ReplaySafety.SAFE)
    async def wait() -> str:
        """Wait."""
        entered.set()
        await go.wait()
        return "waited"

    (port,) = ports(1)
    app = App([Agent("desk", Answers(calls(call("wait")), text("done")), "", [wait])])
    async with running(app, Settings(**STEADY, metrics_port=port)):
        first = await start_raw(client, task_queue, request())
        await entered.wait()
        await first.terminate()
        second = await start_raw(client, task_queue, request())
        found = await counted(port, 'perdure_recoveries_total{kind="taken_over"}')
        go.set()
        result = await asyncio.wait_for(second.result(), 45)

    assert result["answer"] == "done"
    assert found['perdure_recoveries_total{kind="taken_over"}'] == 1


async def test_json_logs_of_a_worker_carry_ids_and_never_a_canary(
    client: Client, server: DevServer, task_queue: str, tmp_path: Path
) -> None:
    environment = {"PERDURE_LOG_FORMAT": "json", "PERDURE_LOG_LEVEL": "DEBUG"}
    async with WorkerProcess(
        tmp_path,
        address=server.address,
        task_queue=task_queue,
        app="canary_app:app",
        **environment,
    ) as worker:
        result = await run_turn(client, task_queue, MESSAGE)
        died = await run_turn(client, task_queue, "die", conversation_id="c2")
        assert await worker.terminate() == 0

    lines = [json.loads(line) for line in worker.log.splitlines()]
    ended = {line["turn"]: line["message"] for line in lines if "turn " in line["message"]}
    assert ended[result.turn_id] == "turn completed: answered"
    assert ended[died.turn_id] == "turn failed: model_failed"
    about = [line for line in lines if line.get("turn") == result.turn_id]
    assert {line.get("step") for line in about} >= {1, 2}
    assert any(line.get("operation", "").startswith("toolop_") for line in about)
    assert any("temporal.activity_type" in line for line in about)
    assert not [canary for canary in (MESSAGE, *CANARIES) if canary in worker.log]
