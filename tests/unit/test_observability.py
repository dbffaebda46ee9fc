"""The parts that measure, alone: extras, observers that break, labels, ids, the health server."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.activities import health as health_module
from perdure.activities.health import Exposition, Health
from perdure.activities.metrics import Metrics
from perdure.activities.observers import Wanted, check_extras
from perdure.activities.telemetry import ModelCall, Observer, Recovery, Telemetry, Work
from perdure.activities.tracing import trace_id_of, turn_span_id_of
from perdure.contracts.errors import ModelUnavailable
from perdure.contracts.ids import derive_turn_id
from perdure.contracts.messages import user_message
from perdure.contracts.model import ModelRequest, ModelResponse, Usage
from perdure.contracts.turn import TurnStatus
from perdure.stores.measured import EndedTurn

REQUEST = ModelRequest(agent="desk", model="answers", messages=(user_message("hello"),))


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=kept | environment,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "variable", "value", "extra"),
    [
        ("prometheus_client", "PERDURE_METRICS_PORT", "9464", "perdure[metrics]"),
        ("opentelemetry", "PERDURE_OTEL", "on", "perdure[otel]"),
    ],
)
def test_a_worker_without_the_extra_of_a_setting_ends_with_one_line_that_names_it(
    library: str, variable: str, value: str, extra: str
) -> None:
    program = f"""
import sys
sys.modules[{library!r}] = None
from perdure.worker import main
raise SystemExit(main(["--app", "perdure.examples.order_desk:app"]))
"""

    done = run_python(program, **{variable: value})

    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert variable in done.stderr
    assert f"pip install '{extra}'" in done.stderr


def test_an_endpoint_of_the_environment_without_the_extra_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    # Those that are loaded would be found there.
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)

    wanted = check_extras(Wanted())

    assert wanted.traces is False
    assert "perdure[otel]" in caplog.text


@pytest.mark.slow
def test_without_settings_no_library_of_an_extra_is_loaded() -> None:
    program = """
import sys
from perdure import Agent, App
from perdure.worker import PerdurePlugin
from perdure.activities.observers import Wanted, check_extras, make_observers
import perdure.cli.main
plugin = PerdurePlugin(App([]), store="sqlite://")
assert make_observers(check_extras(Wanted()), []) == ([], None)
print([name for name in sys.modules if name.startswith(("opentelemetry", "prometheus_client"))])
"""

    done = run_python(program)

    assert done.stdout == "[]\n", done.stderr


class Noting:
    """An observer that keeps what it is told, and breaks where it is asked to."""

    def __init__(self, breaks: bool = False) -> None:
        self.told: list[Any] = []
        self.closed = threading.Event()
        self._breaks = breaks

    def began(self, work: Work) -> None:
        """Keep it."""
        self._note("began", work)

    def ended(self, work: Work) -> None:
        """Keep it."""
        self._note("ended", work)

    def turn_ended(self, turn: EndedTurn) -> None:
        """Keep it."""
        self._note("turn", turn)

    def recovered(self, kind: Recovery, turn_id: str) -> None:
        """Keep it."""
        self._note("recovered", kind)

    def store_answered(self, command: str, seconds: float) -> None:
        """Keep it."""
        self._note("store", command)

    def close(self) -> None:
        """Hang until the test ends, as a collector might."""
        self.closed.wait()

    def _note(self, *fact: Any) -> None:
        self.told.append(fact)
        if self._breaks:
            raise RuntimeError("canary")


async def test_an_observer_that_breaks_is_logged_once_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, well = Noting(breaks=True), Noting()
    observers: list[Observer] = [broken, well]
    telemetry = Telemetry(observers)

    async def answer() -> ModelResponse:
        return ModelResponse()

    for _ in range(2):
        await telemetry.model_call(REQUEST, answer())

    assert [fact[0] for fact in well.told] == ["began", "ended"] * 2
    assert len([record for record in caplog.records if "began failed" in record.message]) == 1
    assert "canary" not in caplog.text


async def test_what_a_model_raises_is_told_by_its_code_and_raised() -> None:
    noting = Noting()
    telemetry = Telemetry([noting])

    async def break_down() -> ModelResponse:
        raise ModelUnavailable("away")

    with pytest.raises(ModelUnavailable):
        await telemetry.model_call(REQUEST, break_down())
    hanging = asyncio.ensure_future(telemetry.model_call(REQUEST, asyncio.Future()))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging

    ended = [fact[1].error for fact in noting.told if fact[0] == "ended"]
    assert ended == ["model_unavailable", "cancelled"]


async def test_an_observer_that_hangs_is_given_up_at_the_end() -> None:
    noting = Noting()
    telemetry = Telemetry([noting])

    async with asyncio.timeout(5):
        await telemetry.close(0.05)

    assert not noting.closed.is_set()
    noting.closed.set()


def ended_turn(**changes: Any) -> EndedTurn:
    """An ended turn as the ledger tells it."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    fields: dict[str, Any] = {
        "turn_id": derive_turn_id("default", "c1", "r1"),
        "namespace": "default",
        "conversation_id": "c1",
        "agent": "desk",
        "status": TurnStatus.FAILED,
        "stop_reason": "model_failed",
        "steps": 1,
        "usage": Usage(),
        "opened_at": moment,
        "ended_at": moment,
    }
    return EndedTurn(**fields | changes)


def test_labels_are_declared_names_and_known_words_only() -> None:
    metrics = Metrics(["desk"])
    strange = ModelCall(REQUEST, error="OpenSesame")

    metrics.turn_ended(ended_turn())
    for number in range(100):
        metrics.turn_ended(ended_turn(agent=f"agent-{number}", stop_reason=f"reason-{number}"))
    metrics.ended(strange)

    page = metrics.exposition().decode()
    turns = [line for line in page.splitlines() if line.startswith("perdure_turns_total{")]
    assert len(turns) == 2
    assert 'agent="other",status="failed",stop_reason="other"} 100.0' in turns[1]
    assert "OpenSesame" not in page


def test_a_turns_trace_has_the_turns_own_digits() -> None:
    turn_id = derive_turn_id("default", "c1", "r1")

    assert f"turn_{trace_id_of(turn_id):032x}" == turn_id
    assert 0 < turn_span_id_of(turn_id) < 2**64


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def well() -> str | None:
    """A check that finds nothing."""
    return None


async def test_a_blocked_event_loop_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "_CHECK_S_MAX", 0.1)
    health = Health(asyncio.get_running_loop(), well, Exposition(lambda: b"x 1\n", "text/plain"))
    port = health.serve("127.0.0.1", 0)
    assert port is not None
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(
        target=lambda: answers.extend(get(port, x) for x in ("/healthz", "/readyz", "/metrics"))
    )

    asking.start()
    # The loop is held here until the probes have been answered without it.
    asking.join(10)
    after = await asyncio.to_thread(get, port, "/healthz")
    await asyncio.to_thread(health.close)

    assert answers == [(503, "no answer\n"), (503, "no answer\n"), (200, "x 1\n")]
    assert after == (200, "ok\n")


async def test_a_check_that_breaks_is_not_ready_and_tells_nothing_more() -> None:
    async def break_down() -> str | None:
        raise RuntimeError("canary")

    health = Health(asyncio.get_running_loop(), break_down)
    port = health.serve("127.0.0.1", 0)
    assert port is not None

    answer = await asyncio.to_thread(get, port, "/readyz")
    await asyncio.to_thread(health.close)

    assert answer == (503, "RuntimeError\n")


async def test_a_port_that_is_taken_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    health = Health(asyncio.get_running_loop(), well)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        assert health.serve("127.0.0.1", port) is None

    assert f"port {port} cannot be served" in caplog.text
    health.close()
