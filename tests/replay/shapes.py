"""The shapes that a turn's history can have: what each recording must contain.

`record.py` makes the recordings and refuses one that has another shape; the tests replay them. A
recording is one event a line, without names of machines, queues and folders.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HISTORIES = Path(__file__).parent / "histories"

COMPLETED = "EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED"
FAILED = "EVENT_TYPE_WORKFLOW_EXECUTION_FAILED"
CANCELED = "EVENT_TYPE_WORKFLOW_EXECUTION_CANCELED"
CONTINUED = "EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW"

# What a model step and a tool leave behind: with this bound a turn continues as new after each.
CONTINUE_AFTER_EVENTS = 15

_ANONYMOUS = {"identity": "worker", "buildId": "build", "normalName": "queue", "name": "queue"}
_SCHEDULED = "EVENT_TYPE_ACTIVITY_TASK_SCHEDULED"


@dataclass(frozen=True)
class Shape:
    """The activities a history schedules, how it ends, and what else must be in it."""

    activities: tuple[str, ...]
    end: str = COMPLETED
    contains: str = ""
    continues: bool = False


def _one_tool(name: str) -> Shape:
    return Shape(("call_model", name, "call_model"))


SHAPES: dict[str, Shape] = {
    "no_tool": Shape(("call_model",)),
    "safe": _one_tool("stage.look"),
    "keyed": _one_tool("stage.pay"),
    "reconciled": _one_tool("stage.ship"),
    "unsafe": _one_tool("stage.send"),
    "parallel": Shape(("call_model", "stage.send", "stage.look", "call_model")),
    "interrupted": Shape(
        ("call_model", "fault.send", "fault.send", "call_model"),
        contains="EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT",
    ),
    "reconciled_after_a_crash": Shape(
        ("call_model", "fault.ship", "fault.ship", "fault.ship:reconcile", "call_model"),
        contains="EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT",
    ),
    "failed": Shape(("call_model", "end"), FAILED),
    "refused": Shape(("call_model",), FAILED),
    "cancelled_in_a_tool": Shape(
        ("call_model", "stage.send", "end"), CANCELED, "EVENT_TYPE_ACTIVITY_TASK_CANCELED"
    ),
    "cancelled_in_a_tool_that_goes_on": Shape(
        ("call_model", "stage.carve", "end"), CANCELED, "EVENT_TYPE_TIMER_FIRED"
    ),
    "cancelled_in_the_model": Shape(("call_model", "end"), CANCELED),
    "cancelled_before_it_opened": Shape(("end",), CANCELED),
    "followed": Shape(("call_model", "follow_turn")),
    "taken_over": Shape(("call_model", "follow_turn", "call_model", "stage.send", "call_model")),
    "reset": Shape(
        ("call_model", "stage.send", "call_model"), contains="EVENT_TYPE_WORKFLOW_TASK_FAILED"
    ),
    "continued_as_new": Shape(("call_model", "stage.look"), CONTINUED, continues=True),
    "continued": Shape(("call_model", "stage.send"), CONTINUED, continues=True),
}


def scheduled(history: dict[str, Any]) -> tuple[str, ...]:
    """The activities that the history schedules, in order."""
    return tuple(
        event["activityTaskScheduledEventAttributes"]["activityType"]["name"]
        for event in history["events"]
        if event["eventType"] == _SCHEDULED
    )


def kinds(history: dict[str, Any]) -> list[str]:
    """The types of its events."""
    return [event["eventType"] for event in history["events"]]


def mismatch(shape: Shape, history: dict[str, Any]) -> str:
    """What is not as the shape says; nothing if it fits."""
    found = (scheduled(history), kinds(history)[-1])
    if found != (shape.activities, shape.end):
        return f"{found}, not {(shape.activities, shape.end)}"
    if shape.contains and shape.contains not in kinds(history):
        return f"there is no {shape.contains}"
    return ""


def anonymous(value: Any, inside: str = "") -> Any:
    """The history without names of machines and queues, and without stack traces."""
    if isinstance(value, list):
        return [anonymous(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    clean: dict[str, Any] = {}
    for key, item in value.items():
        is_name = key != "name" or inside.lower().endswith("taskqueue")
        if key in _ANONYMOUS and is_name and isinstance(item, str):
            clean[key] = _ANONYMOUS[key]
        elif key != "stackTrace":
            clean[key] = anonymous(item, key)
    return clean


def write(name: str, history: dict[str, Any]) -> None:
    """Write a recording, one event a line."""
    lines = ",\n".join(json.dumps(event, sort_keys=True) for event in history["events"])
    (HISTORIES / f"{name}.json").write_text('{"events": [\n' + lines + "\n]}\n")


def path_of_a_machine(text: str) -> re.Match[str] | None:
    """An absolute path of a file in the text, if there is one."""
    return re.search(r"(?<![\w/.:-])/(?:[\w.-]+/)+[\w.-]+", text)
