"""The real Temporal server as a child process: it starts, restarts and leaves nothing behind."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from perdure.cli import dev_server
from perdure.cli.dev_server import DevServer, check_port, find_temporal, free_port
from perdure.contracts.errors import PortTaken, ServerUnreachable, SetupError

pytestmark = [pytest.mark.server, pytest.mark.slow]

_OWNER = """
import asyncio
from perdure.cli.dev_server import DevServer

async def main():
    async with DevServer(ui=False) as server:
        print(server.pid, server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_started_server_answers_clients_and_browsers() -> None:
    async with DevServer() as server:
        client = await Client.connect(server.address)

        handle = await client.start_workflow("Nobody", id=_new_id(), task_queue="nobody")

        assert (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
        assert await asyncio.to_thread(_status_of, f"{server.ui_url}/") == 200


async def test_a_stopped_server_leaves_no_process_and_no_listener() -> None:
    server = DevServer(ui=False)
    await server.start()
    pid = server.pid
    assert pid is not None

    await server.stop()

    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    check_port(server.port)


async def test_stopping_twice_or_before_the_start_does_nothing() -> None:
    server = DevServer(ui=False)

    await server.stop()
    server.kill()

    assert server.pid is None


@pytest.mark.parametrize("which", ["port", "ui_port"])
async def test_a_served_port_is_refused_before_anything_starts(which: str) -> None:
    with socket.create_server((dev_server.HOST, 0)) as other:
        taken = other.getsockname()[1]
        server = DevServer(**{which: taken})

        with pytest.raises(PortTaken, match=str(taken)):
            await server.start()

        assert server.pid is None


async def test_a_second_server_on_the_same_port_is_refused() -> None:
    async with DevServer(ui=False) as server:
        second = DevServer(port=server.port, ui=False)

        with pytest.raises(PortTaken):
            await second.start()

        assert server.pid is not None


async def test_a_server_that_ends_at_once_is_reported_with_its_own_words(tmp_path: Path) -> None:
    database = tmp_path / "temporal.db"
    database.write_text("this is no database")
    server = DevServer(ui=False, database=database)

    with pytest.raises(ServerUnreachable, match="not a database"):
        await server.start()

    assert server.pid is None


async def test_a_workflow_outlives_a_killed_server_on_its_database(tmp_path: Path) -> None:
    async with DevServer(ui=False, database=tmp_path / "temporal.db") as server:
        client = await Client.connect(server.address)
        handle = await client.start_workflow("Nobody", id=_new_id(), task_queue="nobody")
        address, first_pid = server.address, server.pid

        server.kill()
        await server.restart()

        assert (server.address, server.pid != first_pid) == (address, True)
        again = (await Client.connect(server.address)).get_workflow_handle(handle.id)
        assert (await again.describe()).run_id == handle.result_run_id


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_the_process_that_started_it(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline().split()[0])
        server = os.pidfd_open(pid)
        try:
            owner.send_signal(how)
            owner.wait(10)

            assert _ends(server, 20.0)
        finally:
            os.close(server)


def test_a_missing_program_is_a_setup_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SetupError, match=r"perdure\[embedded\]"):
        find_temporal()


def test_a_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    assert 10240 <= free_port() < 32768


def _new_id() -> str:
    return f"dev-server-{uuid.uuid4()}"


def _status_of(url: str) -> int:
    with urllib.request.urlopen(url) as page:
        return page.status


def _ends(pidfd: int, timeout_s: float) -> bool:
    # A pidfd becomes readable when its process has ended.
    readable, _, _ = select.select([pidfd], [], [], timeout_s)
    return bool(readable)
