"""Activity contracts: their inputs and replies survive the wire, small and without defaults."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from perdure.contracts import calls
from perdure.contracts.calls import (
    END,
    FIXED_CONTRACTS,
    CallModel,
    CallRef,
    CallReply,
    CallReplyKind,
    CallTool,
    EndReply,
    EndTurn,
    FollowReply,
    FollowTurn,
    Opening,
    Owner,
    Settle,
    StepKind,
    StepReply,
    TurnRef,
    reconcile_contract,
    tool_contract,
)
from perdure.contracts.messages import Message, Role, TextPart, ToolCallPart, ToolResultPart
from perdure.contracts.safety import FOR_EVER, REPEATED, ReplaySafety, retry_plan
from perdure.contracts.tools import ResultReason
from perdure.contracts.turn import TurnLimits, TurnResult, TurnStatus

TURN = TurnRef(conversation_id="c-1", request_id="r-1")
LATER = TurnRef(
    namespace="tenant.user", conversation_id="c-1", request_id="r-1", epoch=2, store="s", seq=9
)
MESSAGE = Message(
    role=Role.USER,
    parts=(
        TextPart(text="Grüße\n😀"),
        ToolCallPart(name="x", arguments={"n": 2**60}),
        ToolResultPart(call_id="1", name="x", text=""),
    ),
)
OPENING = Opening(
    agent="desk",
    message=MESSAGE,
    request_digest="sha256:1",
    tools=("a",),
    limits=TurnLimits(model_steps_max=3),
    run_id="run",
    take_over=1,
)
RESULT = TurnResult(turn_id="turn_1", status=TurnStatus.COMPLETED, stop_reason="answered")
CALL = CallRef(index=0, tool="x", safety=ReplaySafety.KEYED, timeout_s=1.5, preview='{"a":1}')

WIRE: tuple[Any, ...] = (
    Owner(temporal_namespace="default", workflow_id="w", run_id="r"),
    OPENING,
    CallModel(turn=TURN, step=1, opening=OPENING),
    CallModel(turn=LATER, step=7),
    StepReply(kind=StepKind.CALLS, agent="desk", epoch=1, store="s", seq=4, calls=(CALL, CALL)),
    StepReply(kind=StepKind.OVER, result=RESULT),
    CallTool(turn=LATER, step=2, index=1),
    CallReply(kind=CallReplyKind.SETTLED, seq=5),
    CallReply(kind=CallReplyKind.OVER, result=RESULT),
    Settle(turn=TURN, step=1, index=0),
    Settle(turn=TURN, step=1, index=0, reason=ResultReason.TURN_CANCELLED),
    FollowTurn(turn=TURN, run_id="r"),
    FollowReply(take_over=3),
    FollowReply(result=RESULT),
    EndTurn(
        turn=TURN, run_id="r", status=TurnStatus.CANCELLED, stop_reason="cancelled", opening=OPENING
    ),
    EndReply(),
    EndReply(result=RESULT),
)


@pytest.mark.parametrize("value", WIRE, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_from_plain_json_as_it_was_sent(value: Any) -> None:
    sent = json.loads(json.dumps(value.encode()))

    assert type(value).model_validate(sent) == value


@pytest.mark.parametrize("value", WIRE, ids=lambda value: type(value).__name__)
def test_an_older_worker_reads_a_value_with_a_field_it_does_not_know(value: Any) -> None:
    sent = value.encode() | {"a_new_field": 1}

    assert type(value).model_validate(sent) == value


def test_every_value_of_the_contracts_has_an_example() -> None:
    named = {
        item
        for item in vars(calls).values()
        if isinstance(item, type)
        and issubclass(item, BaseModel)
        and item.__module__ == calls.__name__
    }
    # Both are inside others: the base of all, and the turn.
    inside = {item for item in named if item.__name__ in ("WireModel", "TurnRef")}

    assert {type(value) for value in WIRE} | {CallRef} == named - inside


def test_what_is_a_default_is_not_sent() -> None:
    assert CallModel(turn=TURN, step=1).encode() == {
        "turn": {"conversation_id": "c-1", "request_id": "r-1"},
        "step": 1,
    }
    assert StepReply(kind=StepKind.FOLLOW).encode() == {"kind": "follow"}


def test_identities_stay_small_however_long_the_conversation_is() -> None:
    assert len(json.dumps(CallTool(turn=LATER, step=64, index=127).encode())) < 200


def test_each_contract_has_its_retry_plan() -> None:
    plans = {contract.name: contract.plan for contract in FIXED_CONTRACTS}

    assert plans == {
        "call_model": REPEATED,
        "follow_turn": FOR_EVER,
        "end": FOR_EVER,
        "settle": FOR_EVER,
    }


@pytest.mark.parametrize("safety", ReplaySafety)
def test_a_tools_contract_derives_from_its_safety(safety: ReplaySafety) -> None:
    contract = tool_contract("desk", "refund", safety)

    assert contract.name == "desk.refund"
    assert contract.plan == retry_plan(safety)
    assert (contract.takes, contract.gives) == (CallTool, CallReply)


def test_asking_about_a_lost_generation_may_be_repeated() -> None:
    contract = reconcile_contract("desk", "refund")

    assert contract.name == "desk.refund:reconcile"
    assert contract.plan == REPEATED


def test_no_tool_can_take_the_name_of_a_fixed_activity() -> None:
    # Fixed names have no dot; a tool's type always has one.
    assert [contract.name for contract in FIXED_CONTRACTS if "." in contract.name] == []
    assert END.name == "end"
