"""The scenes of `perdure demo`: where the worker is killed, and what must be true afterwards.

Data and pure checks. It must not start or read anything.
"""

from dataclasses import dataclass
from typing import Final

from perdure.contracts.ids import DEFAULT_NAMESPACE, derive_turn_id, turn_workflow_id
from perdure.contracts.tools import ResultStatus
from perdure.contracts.turn import TurnStatus


@dataclass(frozen=True)
class Scene:
    """One turn whose worker is killed at `point`, and the numbers that its safety promises.

    `starts` counts how often the effect was begun, `lasting` what is left of it in the world.
    """

    title: str
    tool: str
    order: int
    message: str
    point: str
    killed_when: str
    promise: str
    starts: int
    lasting: int | None
    told: ResultStatus

    @property
    def conversation_id(self) -> str:
        """The scene's own conversation."""
        return "demo-" + self.point.replace("_", "-").replace(".", "-")

    @property
    def request_id(self) -> str:
        """The id of its one request."""
        return "request-1"

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return derive_turn_id(DEFAULT_NAMESPACE, self.conversation_id, self.request_id)

    @property
    def workflow_id(self) -> str:
        """The turn's workflow."""
        return turn_workflow_id(DEFAULT_NAMESPACE, self.conversation_id, self.request_id)


@dataclass(frozen=True)
class Facts:
    """What the ledger, the desk's database and Temporal say after the scene."""

    status: TurnStatus
    answer: str
    start_pids: tuple[int, ...]
    lasting: int | None
    results: int
    told: ResultStatus | None
    told_text: str
    generations: int
    recoveries: tuple[str, ...]
    model_calls: int
    terminal_events: int
    terminal_is_last: bool
    history_events: int
    history_bytes: int
    activities: tuple[str, ...]
    replays: bool


@dataclass(frozen=True)
class Check:
    """One promise, and whether it held."""

    promise: str
    held: bool


SCENES: Final = (
    Scene(
        title="SAFE",
        tool="order_status",
        order=1,
        message="What is the status of order 1?",
        point="order_status",
        killed_when="while it looks the order up",
        promise="it is simply run again",
        starts=2,
        lasting=None,
        told=ResultStatus.OK,
    ),
    Scene(
        title="KEYED",
        tool="refund_order",
        order=2,
        message="Refund order 2",
        point="refund_order",
        killed_when="after the money moved, before anybody heard of it",
        promise="it is run again with the same key, and the money moves once",
        starts=2,
        lasting=1,
        told=ResultStatus.OK,
    ),
    Scene(
        title="RECONCILED, not yet done",
        tool="ship_order",
        order=3,
        message="Ship order 3",
        point="ship_order.before",
        killed_when="before the parcel was booked",
        promise="its reconcile function finds no parcel and fences the first run; then it is rerun",
        starts=2,
        lasting=1,
        told=ResultStatus.OK,
    ),
    Scene(
        title="RECONCILED, already done",
        tool="ship_order",
        order=5,
        message="Ship order 5",
        point="ship_order",
        killed_when="after the parcel was booked, before anybody heard of it",
        promise="its reconcile function finds the parcel; it is not run again",
        starts=1,
        lasting=1,
        told=ResultStatus.OK,
    ),
    Scene(
        title="UNSAFE",
        tool="notify_customer",
        order=4,
        message="Notify the customer of order 4",
        point="notify_customer",
        killed_when="after the mail left, before anybody heard of it",
        promise="it is never run again; the model is told that it may have happened",
        starts=1,
        lasting=1,
        told=ResultStatus.INTERRUPTED,
    ),
)


def times(count: int) -> str:
    """How often, in words."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def check_scene(scene: Scene, facts: Facts, killed_pid: int) -> tuple[Check, ...]:
    """Every promise of the scene, held or not."""
    checks = [
        Check("the killed worker had begun the effect", facts.start_pids[:1] == (killed_pid,)),
        Check(f"the effect was begun {times(scene.starts)}", len(facts.start_pids) == scene.starts),
        Check(
            f"the call has one result, {scene.told.value}",
            (facts.results, facts.told) == (1, scene.told),
        ),
        Check("the model was asked twice and no answer was bought again", facts.model_calls == 2),
        Check(
            "the turn completed, with one terminal event, its last",
            facts.status is TurnStatus.COMPLETED
            and facts.terminal_events == 1
            and facts.terminal_is_last,
        ),
        Check("the workflow's history replays", facts.replays),
    ]
    if scene.lasting is not None:
        checks.insert(
            2, Check(f"it happened {times(scene.lasting)}", facts.lasting == scene.lasting)
        )
    return tuple(checks)
