"""Recording histories of real turns, and replaying them against the code that is installed.

A change of workflow code that does not replay parks the turns that are running when it is deployed.
The turn's workflow is Perdure's own, so what can change is its version, workflows of the user's
own on the same workers, and the agents and tools that turns on record have used.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHistory
from temporalio.converter import DataConverter
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from perdure.agents import App
from perdure.contracts.errors import SetupError

TURNS: Final = "WorkflowType = 'AgentTurn'"
HISTORIES_MAX: Final = 100
_TURN: Final = "AgentTurn"
_RECONCILE: Final = ":reconcile"
_PROBLEM_CHARS_MAX: Final = 600


@dataclass(frozen=True)
class _Recorded:
    """A history, what it is called for people, and its workflow's type and input."""

    history: WorkflowHistory
    name: str

    @property
    def _started(self) -> Any:
        return self.history.events[0].workflow_execution_started_event_attributes

    @property
    def workflow_type(self) -> str:
        return self._started.workflow_type.name

    @property
    def input(self) -> Any:
        return self._started.input.payloads

    @property
    def tools(self) -> set[str]:
        """`<agent>.<tool>` of each tool that the workflow has scheduled."""
        names = {
            event.activity_task_scheduled_event_attributes.activity_type.name
            for event in self.history.events
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        }
        return {name.removesuffix(_RECONCILE) for name in names if "." in name}


async def record_histories(
    client: Client, folder: Path | str, *, query: str = TURNS, limit: int = HISTORIES_MAX
) -> list[Path]:
    """Write the newest histories that match the query into the folder, a JSON file for each run.

    They are as Temporal's CLI writes them, without the names of machines. They hold what callers
    have sent, and short previews unless `PERDURE_PREVIEWS` is off: keep them as you keep that data.
    """
    written: list[Path] = []
    async for execution in client.list_workflows(query, limit=limit):
        handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
        history = await handle.fetch_history()
        path = Path(folder) / f"{_file_name(execution.id)}.{execution.run_id}.json"
        _write(path, _without_machines(history.to_json_dict()))
        written.append(path)
    return written


async def replays(
    histories: Path | str | Client | Iterable[WorkflowHistory],
    *,
    app: App | None = None,
    workflows: Sequence[type] = (),
    data_converter: DataConverter | None = None,
) -> int:
    """Replay histories against the installed code; returns how many there were.

    `histories` is a JSON file, a folder of them, a client (every turn of its server) or histories.
    With `app`, its agents and tools must also include those that the turns have used. `workflows`
    are the user's own beside `AgentTurn`. Raises AssertionError that names each workflow that does
    not replay, and SetupError if there is no history, or a file that is none.
    """
    if isinstance(histories, Client):
        data_converter = data_converter or histories.data_converter
        recorded = await _of_server(histories, workflows)
    elif isinstance(histories, (Path, str)):
        recorded = _of_files(Path(histories))
    else:
        recorded = [_named(history, "") for history in histories]
    if not recorded:
        raise SetupError("there is no history to replay")
    check = _Check(app, workflows, data_converter or DataConverter.default)
    problems = [(item.name, await check.problem(item)) for item in recorded]
    failed = [f"{name}: {problem}" for name, problem in problems if problem]
    if failed:
        head = f"{len(failed)} of {len(recorded)} histories do not fit the installed code:"
        raise AssertionError("\n  ".join([head, *failed]))
    return len(recorded)


class _Check:
    def __init__(
        self, app: App | None, workflows: Sequence[type], data_converter: DataConverter
    ) -> None:
        from perdure.worker import workflow_runner
        from perdure.workflows import AgentTurn

        self._app = app
        self._data_converter = data_converter
        self._types = {_type_name(workflow) for workflow in (AgentTurn, *workflows)}
        self._replayer = Replayer(
            workflows=[AgentTurn, *workflows],
            workflow_runner=workflow_runner(),
            data_converter=data_converter,
        )

    async def problem(self, recorded: _Recorded) -> str:
        """What is wrong with a history; nothing if it replays."""
        if recorded.workflow_type not in self._types:
            return f"its type {recorded.workflow_type!r} is unknown; pass workflows=[...]"
        replayed = await self._replayer.replay_workflow(
            recorded.history, raise_on_replay_failure=False
        )
        failure = replayed.replay_failure
        if failure is not None:
            kind = (
                "another decision than recorded, so such a turn would park"
                if isinstance(failure, NondeterminismError)
                else type(failure).__name__
            )
            return f"{kind}: {str(failure)[:_PROBLEM_CHARS_MAX]}"
        return await self._gone(recorded)

    async def _gone(self, recorded: _Recorded) -> str:
        if self._app is None or recorded.workflow_type != _TURN:
            return ""
        agents = self._app.agents
        (request, *_) = await self._data_converter.decode(recorded.input)
        is_object = isinstance(request, dict)
        agent = str(cast("dict[str, Any]", request).get("agent", "")) if is_object else ""
        if agent and agent not in agents:
            return f"the app has no agent {agent!r}"
        kept = {f"{owner.name}.{tool.name}" for owner in agents.values() for tool in owner.tools}
        gone = sorted(recorded.tools - kept)
        return f"the app has no tool {', '.join(gone)}" if gone else ""


def _type_name(workflow: type) -> str:
    from temporalio import workflow as sdk

    # The SDK has no public way to ask for the name under which a workflow is registered.
    definition = sdk._Definition.must_from_class(workflow)  # pyright: ignore[reportPrivateUsage]
    return definition.name or workflow.__name__


async def _of_server(client: Client, workflows: Sequence[type]) -> list[_Recorded]:
    names = [_TURN, *(_type_name(workflow) for workflow in workflows)]
    query = " OR ".join(f"WorkflowType = '{name}'" for name in names)
    found: list[_Recorded] = []
    async for execution in client.list_workflows(query):
        handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
        found.append(_named(await handle.fetch_history(), ""))
    return found


def _of_files(place: Path) -> list[_Recorded]:
    if not place.exists():
        raise SetupError(f"there is no file or folder {place}")
    paths = sorted(place.rglob("*.json")) if place.is_dir() else [place]
    return [_of_file(path) for path in paths]


def _of_file(path: Path) -> _Recorded:
    try:
        history = WorkflowHistory.from_json(path.stem, path.read_text("utf-8"))
    # The file is a stranger's: the library raises several kinds for what is no history.
    except Exception as error:
        raise SetupError(f"{path} is not a history: {type(error).__name__}") from error
    if not history.events:
        raise SetupError(f"{path} is not a history: it has no events")
    return _named(history, f" ({path})")


def _named(history: WorkflowHistory, where: str) -> _Recorded:
    started = history.events[0].workflow_execution_started_event_attributes
    workflow_id = started.workflow_id or history.workflow_id
    return _Recorded(history, f"{started.workflow_type.name} {workflow_id}{where}")


def _file_name(workflow_id: str) -> str:
    # A workflow id has slashes, and whatever else a caller has chosen.
    kept = "".join(char if char.isalnum() or char in "._-" else "_" for char in workflow_id)
    return kept[:100]


def _write(path: Path, history: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(event, sort_keys=True) for event in history["events"])
    path.write_text('{"events": [\n' + lines + "\n]}\n", "utf-8")


def _without_machines(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_machines(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    kept = {key: _without_machines(item) for key, item in fields.items() if key != "stackTrace"}
    if "identity" in kept:
        kept["identity"] = "worker"
    if "normalName" in kept:
        # The queue of one worker alone is named after its machine.
        kept["name"] = kept["normalName"]
    return kept
