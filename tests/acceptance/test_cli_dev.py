"""`perdure dev` and the commands a person types beside it, as programs on a real server."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.cli.dev_server import HOST, check_port, free_port
from perdure.stores import open_store
from perdure.stores.migrate import VERSION_TABLE

pytestmark = [pytest.mark.server, pytest.mark.slow]

APP = "perdure.examples.order_desk:app"


@dataclass(frozen=True)
class Dev:
    """A running `perdure dev`."""

    folder: Path
    port: int
    ui_port: int
    process: subprocess.Popen[str]
    said: str

    def perdure(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run another command in the same folder, against the same server."""
        environment = {"TEMPORAL_ADDRESS": f"{HOST}:{self.port}", **environment}
        return _perdure(self.folder, *arguments, **environment)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Generator[Dev, None, None]:
    with _running_dev(tmp_path_factory.mktemp("dev")) as dev:
        yield dev


def test_it_prints_the_address_of_a_ui_that_answers(dev: Dev) -> None:
    assert f"http://{HOST}:{dev.ui_port}" in dev.said
    with urllib.request.urlopen(f"http://{HOST}:{dev.ui_port}/") as page:
        assert page.status == 200


def test_a_question_shows_calls_results_and_the_answer(dev: Dev) -> None:
    asked = dev.perdure("ask", "order-desk", "What is the status of order 1?")

    assert asked.returncode == 0, asked.stderr
    assert '→ order_status {"order": 1}' in asked.stdout
    assert '← order_status {"order":1,"item":"espresso machine"' in asked.stdout
    assert "The desk reports:" in asked.stdout
    assert asked.stderr == ""


def test_a_question_in_json_is_the_result_and_the_same_request_the_same_turn(dev: Dev) -> None:
    question = ("ask", "order-desk", "Refund order 2", "--json")
    same = ("--conversation", "json", "--request-id", "r1")

    first = dev.perdure(*question, *same)
    second = dev.perdure(*question, *same)

    result = json.loads(first.stdout)
    assert (result["status"], result["conversation_version"]) == ("completed", 1)
    assert json.loads(second.stdout) == result
    assert _count(dev, "SELECT count(*) FROM effects WHERE tool = 'refund_order'") == 1


def test_another_question_under_the_same_request_id_is_refused(dev: Dev) -> None:
    same = ("--conversation", "conflict", "--request-id", "r1")
    dev.perdure("ask", "order-desk", "Hello", *same)

    other = dev.perdure("ask", "order-desk", "Good morning", *same)

    assert (other.returncode, other.stdout) == (2, "")
    assert "request_conflict" in other.stderr


def test_an_unknown_agent_is_named_with_those_that_there_are(dev: Dev) -> None:
    asked = dev.perdure("ask", "nobody", "Hello")

    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr == (
        "perdure: there is no agent 'nobody'; this app has: order-desk (unknown_agent)\n"
    )


def test_an_answer_comes_also_where_the_ledger_is_elsewhere(dev: Dev) -> None:
    asked = dev.perdure("ask", "order-desk", "Hello", "--store", "elsewhere.db")

    assert asked.returncode == 0
    assert "Hello! What can I do for you" in asked.stdout
    assert "elsewhere.db" in asked.stderr
    assert not (dev.folder / "elsewhere.db").exists()


def test_a_transcript_and_a_turn_can_be_read_back(dev: Dev) -> None:
    asked = dev.perdure("ask", "order-desk", "Ship order 3", "--conversation", "read", "--json")
    turn_id = json.loads(asked.stdout)["turn_id"]

    transcript = dev.perdure("transcript", "read")
    lines = dev.perdure("transcript", "read", "--json", "--after", "1", "--limit", "2").stdout
    turn = dev.perdure("turn", "show", turn_id)
    details = json.loads(dev.perdure("turn", "show", turn_id, "--json").stdout)

    assert "Ship order 3" in transcript.stdout
    assert "→ ship_order" in transcript.stdout
    assert [json.loads(line)["sequence"] for line in lines.splitlines()] == [2, 3]
    for fact in (turn_id, "completed (answered)", "ship_order reconciled", "execution 1", "won"):
        assert fact in turn.stdout
    assert details["operations"][0]["generations"][0]["outcome"] == "won"


def test_what_is_not_there_is_said(dev: Dev) -> None:
    conversation = dev.perdure("transcript", "nowhere")
    turn = dev.perdure("turn", "show", "turn_none")

    assert (conversation.returncode, turn.returncode) == (2, 2)
    assert "nowhere" in conversation.stderr
    assert "turn_none" in turn.stderr


def test_a_database_of_a_newer_program_is_refused(dev: Dev, tmp_path: Path) -> None:
    newer = tmp_path / "newer.db"
    open_store(f"sqlite:///{newer}").close()
    with contextlib.closing(sqlite3.connect(newer)) as database:
        database.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        database.commit()

    shown = dev.perdure("turn", "show", "turn_1", "--store", str(newer))

    assert shown.returncode == 2
    assert "store_schema_newer" in shown.stderr


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_question_without_a_worker_says_so_and_leaves_the_turn_when_interrupted(dev: Dev) -> None:
    command = _command("ask", "order-desk", "Hello", "--task-queue", "deserted")
    environment = _environment(dev.folder, TEMPORAL_ADDRESS=f"{HOST}:{dev.port}")
    with subprocess.Popen(
        command,
        cwd=dev.folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore the signal.
        preexec_fn=_take_interrupts,
    ) as asking:
        assert asking.stderr is not None
        try:
            hint = asking.stderr.readline()
            asking.send_signal(signal.SIGINT)
            _, rest = asking.communicate(timeout=30)
        finally:
            asking.kill()

    assert "no worker polls the task queue 'deserted'" in hint
    assert "the turn goes on: perdure turn show turn_" in rest
    assert "Traceback" not in rest
    assert asking.returncode not in (0, 2)


@pytest.mark.parametrize("which", ["--temporal-port", "--ui-port"])
def test_a_second_one_on_a_served_port_is_refused(dev: Dev, tmp_path: Path, which: str) -> None:
    ports = {"--temporal-port": str(free_port()), "--ui-port": str(free_port())}
    ports[which] = str(dev.port)

    second = _perdure(tmp_path, "dev", APP, *(word for pair in ports.items() for word in pair))

    assert second.returncode == 2
    assert str(dev.port) in second.stderr
    assert dev.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_with_its_children(tmp_path: Path, number: signal.Signals) -> None:
    with _running_dev(tmp_path) as dev:
        dev.process.send_signal(number)

        assert dev.process.wait(30) == 0
        for port in (dev.port, dev.ui_port):
            check_port(port)


def test_it_ends_when_its_server_ends(tmp_path: Path) -> None:
    with _running_dev(tmp_path) as dev:
        children = Path(f"/proc/{dev.process.pid}/task/{dev.process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)

        assert dev.process.wait(30) == 2


@contextlib.contextmanager
def _running_dev(folder: Path) -> Generator[Dev, None, None]:
    port, ui_port = free_port(), free_port()
    ports = ("--temporal-port", str(port), "--ui-port", str(ui_port))
    with (folder / "dev.log").open("w") as log:
        process = subprocess.Popen(
            _command("dev", APP, *ports, "--db", "ledger.db", "--temporal-db", "temporal.db"),
            cwd=folder,
            env=_environment(folder, PERDURE_HEARTBEAT_TIMEOUT_S="2"),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = "".join(iter(process.stdout.readline, "Stop          Ctrl-C\n"))
            yield Dev(folder, port, ui_port, process, said)
        finally:
            process.terminate()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


def _perdure(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments),
        cwd=folder,
        env=_environment(folder, **environment),
        capture_output=True,
        text=True,
        timeout=60,
    )


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perdure.cli.main", *arguments]


def _environment(folder: Path, **changes: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "PERDURE_STORE_URL": f"sqlite:///{folder / 'ledger.db'}",
        **changes,
    }


def _count(dev: Dev, query: str) -> int:
    desk = dev.folder / "perdure-data" / "order-desk" / "orders.db"
    with contextlib.closing(sqlite3.connect(desk)) as database:
        return database.execute(query).fetchone()[0]
