"""Recorded turns of every shape replay: the workflow may be deployed while such turns are running.

If a test here fails after a change of the workflow, running turns would park: `record.py` says when
new recordings are in order.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from replay.shapes import (
    CONTINUE_AFTER_EVENTS,
    HISTORIES,
    SHAPES,
    anonymous,
    kinds,
    mismatch,
    path_of_a_machine,
    scheduled,
)
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from perdure.contracts import limits
from perdure.worker import workflow_runner
from perdure.workflows import AgentTurn


def read(name: str) -> dict[str, Any]:
    """A recording."""
    return json.loads((HISTORIES / f"{name}.json").read_text())


async def replay(name: str, history: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run today's workflow against the history. Raises where it would do something else."""
    if SHAPES[name].continues:
        monkeypatch.setattr(limits, "CONTINUE_AS_NEW_EVENTS", CONTINUE_AFTER_EVENTS)
    replayer = Replayer(workflows=[AgentTurn], workflow_runner=workflow_runner())
    await replayer.replay_workflow(WorkflowHistory.from_json(name, history))


def test_there_is_one_recording_of_each_shape() -> None:
    assert sorted(path.stem for path in HISTORIES.glob("*.json")) == sorted(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
async def test_a_recorded_turn_replays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    history = read(name)
    assert mismatch(SHAPES[name], history) == ""

    await replay(name, history, monkeypatch)


@pytest.mark.parametrize("name", SHAPES)
async def test_a_workflow_that_schedules_another_activity_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = read(name)
    last = [event for event in history["events"] if "activityTaskScheduled" in str(event)][-1]
    last["activityTaskScheduledEventAttributes"]["activityType"]["name"] = "another"
    assert scheduled(history)[-1] == "another"

    with pytest.raises(NondeterminismError):
        await replay(name, history, monkeypatch)


async def test_a_workflow_that_no_longer_continues_as_new_is_noticed() -> None:
    history = WorkflowHistory.from_json("continued_as_new", read("continued_as_new"))
    replayer = Replayer(workflows=[AgentTurn], workflow_runner=workflow_runner())

    with pytest.raises(NondeterminismError):
        await replayer.replay_workflow(history)


@pytest.mark.parametrize("name", SHAPES)
def test_a_recording_names_no_machine(name: str) -> None:
    history = read(name)

    assert anonymous(history) == history
    assert "stackTrace" not in json.dumps(history)
    for text in [json.dumps(history), *decoded(history)]:
        assert path_of_a_machine(text) is None, text
    assert kinds(history)[0] == "EVENT_TYPE_WORKFLOW_EXECUTION_STARTED"


def decoded(value: Any) -> Iterator[str]:
    """The text of every payload."""
    if isinstance(value, list):
        for item in value:
            yield from decoded(item)
    elif isinstance(value, dict):
        if isinstance(value.get("data"), str):
            yield base64.b64decode(value["data"]).decode()
        for item in value.values():
            yield from decoded(item)
