"""What is true after a scene of `perdure demo`: read from the ledger, the desk and Temporal.

It only reads, and it reads each fact where it is kept: the desk's effects in the desk's database,
not in what we recorded of them.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from temporalio.client import Client, WorkflowHistory

from perdure.cli.demo_scenes import Facts, Scene
from perdure.contracts.events import RecoveryDecided, ToolSettled, TurnEnded
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.turn import TurnResult
from perdure.stores.queries import Reader
from perdure.worker import replayer

_LASTING = {
    "refund_order": "SELECT count(*) FROM refunds WHERE order_id = ?",
    "ship_order": "SELECT count(*) FROM shipments WHERE order_id = ?",
}


async def gather_facts(
    scene: Scene, result: TurnResult, reader: Reader, desk: Path, client: Client
) -> Facts:
    """Everything the scene's checks need."""
    details = reader.details(scene.turn_id)
    events = [recorded.event for recorded in reader.turn_events(scene.turn_id)]
    results = [event for event in events if isinstance(event, ToolSettled)]
    ends = [event for event in events if isinstance(event, TurnEnded)]
    history = await client.get_workflow_handle(scene.workflow_id).fetch_history()
    return Facts(
        status=result.status,
        answer=result.answer or "",
        start_pids=_start_pids(desk, derive_operation_id(scene.turn_id, 1, 0)),
        lasting=_lasting(desk, scene),
        results=len(results),
        told=results[0].status if results else None,
        told_text=results[0].text if results else "",
        generations=results[0].generation if results else 0,
        recoveries=tuple(
            event.decision.value for event in events if isinstance(event, RecoveryDecided)
        ),
        model_calls=0 if details is None else len(details.model_attempts),
        terminal_events=len(ends),
        terminal_is_last=bool(events) and isinstance(events[-1], TurnEnded),
        history_events=len(history.events),
        history_bytes=sum(event.ByteSize() for event in history.events),
        activities=_activities(history),
        replays=await _replays(history),
    )


def _start_pids(desk: Path, operation_id: str) -> tuple[int, ...]:
    with closing(sqlite3.connect(desk / "orders.db")) as database:
        rows = database.execute(
            "SELECT pid FROM effects WHERE operation_id = ? ORDER BY id", (operation_id,)
        ).fetchall()
    return tuple(row[0] for row in rows)


def _lasting(desk: Path, scene: Scene) -> int | None:
    if scene.tool == "notify_customer":
        lines = (desk / "outbox.jsonl").read_text("utf-8").splitlines()
        return sum(json.loads(line)["order"] == scene.order for line in lines)
    query = _LASTING.get(scene.tool)
    if query is None:
        return None
    with closing(sqlite3.connect(desk / "orders.db")) as database:
        return database.execute(query, (scene.order,)).fetchone()[0]


def _activities(history: WorkflowHistory) -> tuple[str, ...]:
    return tuple(
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in history.events
        if event.HasField("activity_task_scheduled_event_attributes")
    )


async def _replays(history: WorkflowHistory) -> bool:
    replayed = await replayer().replay_workflow(history, raise_on_replay_failure=False)
    return replayed.replay_failure is None
