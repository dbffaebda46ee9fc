"""The Temporal server away or killed while turns are in tools and models: the ledger remembers.

Each test has a server of its own on a database file. A server that is away for longer than ten
seconds makes a worker drop what its activities returned (measured).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import WorkerProcess, effect_counts, model_calls, until
from harness.turn_stage import result_of, start_fault_turn
from harness.turns import activities_of
from temporalio.client import Client

from perdure.cli.dev_server import DevServer
from perdure.contracts.ids import TurnKey
from perdure.contracts.tools import ResultStatus
from perdure.contracts.views import TurnDetails
from perdure.stores import Store
from perdure.stores.queries import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

AWAY_S = 15.0
QUEUE = "outage"


@pytest.fixture
def server_on_disk(tmp_path: Path) -> DevServer:
    return DevServer(ui=False, database=tmp_path / "temporal.db")


@pytest.fixture
def reader(file_store: Store) -> Iterator[Reader]:
    return Reader(file_store)


def details_of(reader: Reader, conversation: str) -> TurnDetails:
    """All that happened in the only turn of the conversation."""
    key = TurnKey(conversation_id=conversation, request_id="r1")
    found = reader.details(key.turn_id)
    assert found is not None
    return found


def has_result(reader: Reader, conversation: str) -> bool:
    """Whether the turn's call has the result of its tool."""
    (operation,) = details_of(reader, conversation).operations
    return operation.status == ResultStatus.OK


def executions(reader: Reader, conversation: str) -> list[str | None]:
    """What became of each execution of the turn's only call."""
    (operation,) = details_of(reader, conversation).operations
    return [generation.outcome for generation in operation.generations]


async def test_results_and_answers_of_an_outage_of_fifteen_seconds_are_not_lost(
    server_on_disk: DevServer, reader: Reader, tmp_path: Path
) -> None:
    # The third answer is the final one of the turn without tools.
    fate = {"PERDURE_FAULT_HOLD": "send,look", "failpoints": "commit_answer.committed=hold@3"}
    async with (
        server_on_disk as server,
        WorkerProcess(tmp_path, address=server.address, task_queue=QUEUE, **fate) as worker,
    ):
        client = await Client.connect(server.address)
        sending = await start_fault_turn(client, QUEUE, "use send", "sending")
        await until((tmp_path / "holding.send").exists)
        looking = await start_fault_turn(client, QUEUE, "use look", "looking")
        await until((tmp_path / "holding.look").exists)
        answering = await start_fault_turn(client, QUEUE, "hello", "answering")
        await worker.reached("commit_answer.committed")

        server.kill()
        (tmp_path / "release").touch()
        worker.release("commit_answer.committed")
        # The outage itself, not a wait for something.
        await asyncio.sleep(AWAY_S)
        assert all(has_result(reader, which) for which in ("sending", "looking"))
        await server.restart()

        client = await Client.connect(server.address)
        handles = [client.get_workflow_handle(item.id) for item in (sending, looking, answering)]
        answers = [(await result_of(handle)).answer for handle in handles]
        asked_for = activities_of(await handles[0].fetch_history())
    assert answers == ["done: sent", "done: seen", "hello"]
    # Temporal never got the result of the first; the second found it in the ledger.
    assert asked_for == ["call_model", "fault.send", "fault.send", "call_model"]
    assert effect_counts(tmp_path) == {"send": 1, "look": 1}
    assert model_calls(tmp_path) == {1: 3, 2: 2}
    assert executions(reader, "sending") == executions(reader, "looking") == ["won"]
    assert details_of(reader, "sending").late_results == ()


async def test_turns_go_on_after_the_server_was_killed_and_restarted(
    server_on_disk: DevServer, reader: Reader, tmp_path: Path
) -> None:
    # The third answer is the final one of the turn without tools; a model streams beside it.
    fate = {"PERDURE_FAULT_HOLD": "send,ship", "failpoints": "commit_answer.committed=hold@3"}
    async with (
        server_on_disk as server,
        WorkerProcess(tmp_path, address=server.address, task_queue=QUEUE, **fate) as worker,
    ):
        client = await Client.connect(server.address)
        started = [await start_fault_turn(client, QUEUE, "use send", "sending")]
        await until((tmp_path / "holding.send").exists)
        started.append(await start_fault_turn(client, QUEUE, "use ship", "shipping"))
        await until((tmp_path / "holding.ship").exists)
        started.append(await start_fault_turn(client, QUEUE, "hello", "answering"))
        await worker.reached("commit_answer.committed")
        started.append(await start_fault_turn(client, QUEUE, "stream held", "streaming"))
        streaming = TurnKey(conversation_id="streaming", request_id="r1").turn_id
        await until(lambda: reader.partials(streaming))

        server.kill()
        await server.restart()

        client = await Client.connect(server.address)
        new = await start_fault_turn(client, QUEUE, "hello", "new")
        assert (await result_of(new)).answer == "hello"
        (tmp_path / "release").touch()
        worker.release("commit_answer.committed")
        handles = [client.get_workflow_handle(item.id) for item in started]
        answers = [(await result_of(handle)).answer for handle in handles]
    assert answers == ["done: sent", "done: shipped", "hello", "one two three"]
    assert effect_counts(tmp_path) == {"send": 1, "ship": 1}
    assert executions(reader, "sending") == executions(reader, "shipping") == ["won"]
    assert [item.status for item in details_of(reader, "answering").model_attempts] == ["committed"]
    committed = [item.status for item in details_of(reader, "streaming").model_attempts]
    assert committed.count("committed") == 1
    # Only the stream may have been asked for again: nothing else was without an answer.
    assert sum(model_calls(tmp_path).values()) == 7 + len(committed) - 1
