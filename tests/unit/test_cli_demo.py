"""The demo's verdict: each scene's promises hold for good facts and fail for each wrong one."""

from dataclasses import replace
from typing import Any

import pytest

from perdure.cli.demo_scenes import SCENES, Facts, Scene, check_scene
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultStatus
from perdure.contracts.turn import TurnStatus
from perdure.examples.order_desk import order_desk

KILLED = 41


def test_the_scenes_show_every_replay_safety() -> None:
    shown = {tool.replay for scene in SCENES if (tool := order_desk.tool(scene.tool)) is not None}

    assert shown == set(ReplaySafety)


def test_no_two_scenes_share_an_order_or_a_conversation() -> None:
    assert len({scene.order for scene in SCENES}) == len(SCENES)
    assert len({scene.conversation_id for scene in SCENES}) == len(SCENES)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.point)
def test_every_promise_holds_for_good_facts(scene: Scene) -> None:
    assert [check for check in check_scene(scene, _good(scene), KILLED) if not check.held] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": TurnStatus.FAILED},
        {"start_pids": ()},
        {"start_pids": (KILLED, 42, 43)},
        {"start_pids": (42,)},
        {"results": 0, "told": None},
        {"results": 2},
        {"told": ResultStatus.ERROR},
        {"model_calls": 3},
        {"terminal_events": 2},
        {"terminal_is_last": False},
        {"replays": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.point)
def test_a_broken_promise_is_seen(scene: Scene, wrong: dict[str, Any]) -> None:
    facts = replace(_good(scene), **wrong)

    assert not all(check.held for check in check_scene(scene, facts, KILLED))


@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene.lasting is not None])
def test_an_effect_that_happened_twice_or_never_is_seen(scene: Scene) -> None:
    for lasting in (0, 2):
        facts = replace(_good(scene), lasting=lasting)

        assert not all(check.held for check in check_scene(scene, facts, KILLED))


def _good(scene: Scene) -> Facts:
    return Facts(
        status=TurnStatus.COMPLETED,
        answer="done",
        start_pids=(KILLED, 42)[: scene.starts],
        lasting=scene.lasting,
        results=1,
        told=scene.told,
        told_text="text",
        generations=scene.starts,
        recoveries=(),
        model_calls=2,
        terminal_events=1,
        terminal_is_last=True,
        history_events=23,
        history_bytes=2800,
        activities=("call_model", "order-desk.order_status", "call_model"),
        replays=True,
    )
