"""Identities: alphabets, and derivations that must never change (golden values)."""

import hashlib

import pytest
from pydantic import TypeAdapter, ValidationError

from perdure.contracts.calls import CallRef, TurnRef
from perdure.contracts.ids import (
    Identifier,
    Namespace,
    ToolName,
    TurnKey,
    derive_operation_id,
    derive_turn_id,
    reconcile_activity_type,
    tool_activity_type,
    turn_workflow_id,
)
from perdure.contracts.safety import ReplaySafety

IDENTIFIER, NAMESPACE, TOOL_NAME = (
    TypeAdapter[str](kind) for kind in (Identifier, Namespace, ToolName)
)


def accepts(adapter: TypeAdapter[str], value: object) -> bool:
    """Whether the value is of that kind."""
    try:
        return adapter.validate_python(value) == value
    except ValidationError:
        return False


def test_the_turn_id_is_pinned() -> None:
    # A change here would make every request in every ledger a new one.
    assert derive_turn_id("default", "c-1", "r-1") == "turn_f7aa1c65389b8c32ef538fc291133300"


def test_the_operation_id_is_pinned() -> None:
    # It is the idempotency key that callees have stored.
    turn_id = derive_turn_id("default", "c-1", "r-1")

    assert derive_operation_id(turn_id, 1, 0) == "toolop_9f7054f91f0af7551fff98925c6f6e06"
    assert derive_operation_id(turn_id, 12, 127) == "toolop_9f64cda6a53608e67a3da09d95a33bc8"


def test_the_operation_id_is_built_as_the_design_says() -> None:
    turn_id = derive_turn_id("default", "c-1", "r-1").encode()
    domain = b"perdure.operation.v1"
    data = len(domain).to_bytes(8, "big") + domain + len(turn_id).to_bytes(8, "big") + turn_id
    data += (3).to_bytes(8, "big") + (7).to_bytes(8, "big")

    digest = hashlib.sha256(data).hexdigest()
    assert derive_operation_id(turn_id.decode(), 3, 7) == f"toolop_{digest[:32]}"


def test_ids_have_their_prefix_and_32_hex_digits() -> None:
    turn_id = derive_turn_id("n", "c", "r")
    prefix, digits = derive_operation_id(turn_id, 1, 0).split("_")

    assert prefix == "toolop"
    assert len(digits) == 32
    assert int(digits, 16) > 0
    assert len(turn_id) == len("turn_") + 32
    assert accepts(IDENTIFIER, turn_id)


def test_ids_differ_where_their_parts_differ_only_in_their_borders() -> None:
    ids = {
        derive_turn_id("a", "bc", "d"),
        derive_turn_id("ab", "c", "d"),
        derive_turn_id("a", "b", "cd"),
        derive_turn_id("d", "bc", "a"),
    }

    assert len(ids) == 4


def test_operations_of_one_turn_differ_by_step_and_by_index() -> None:
    ids = {derive_operation_id("turn_1", step, index) for step in range(12) for index in range(12)}

    assert len(ids) == 144


def test_a_key_derives_its_id_from_identity_alone() -> None:
    key = TurnKey(conversation_id="c-1", request_id="r-1")
    ref = TurnRef(conversation_id="c-1", request_id="r-1", epoch=3, store="s", seq=9)

    assert key.turn_id == ref.turn_id == derive_turn_id("default", "c-1", "r-1")


def test_a_call_derives_its_id_from_turn_step_and_index() -> None:
    call = CallRef(index=2, tool="t", safety=ReplaySafety.SAFE, timeout_s=1)

    assert call.operation_id("turn_1", 4) == derive_operation_id("turn_1", 4, 2)


@pytest.mark.parametrize("value", ["a", "A-z_0.9:x", "a" * 128, ".", "-"])
def test_an_identifier_may_be(value: str) -> None:
    assert accepts(IDENTIFIER, value)


@pytest.mark.parametrize(
    "value", ["", "a" * 129, "a b", "a/b", "a\n", "\n", "é", "a\x00", "٣", 1, None, ["a"]]
)
def test_an_identifier_may_not_be(value: object) -> None:
    assert not accepts(IDENTIFIER, value)


@pytest.mark.parametrize("value", ["a:b", "", "n" * 129, "a/b", "a\n"])
def test_a_namespace_may_not_be(value: str) -> None:
    assert not accepts(NAMESPACE, value)


def test_a_namespace_may_have_dots() -> None:
    assert accepts(NAMESPACE, "tenant.user")


@pytest.mark.parametrize("value", ["a.b", "a:b", "", "t" * 65, "a b", "a\n"])
def test_a_tool_name_may_not_be(value: str) -> None:
    assert not accepts(TOOL_NAME, value)


def test_the_tool_name_may_have_64_characters() -> None:
    assert accepts(TOOL_NAME, "t" * 64)


def test_activity_types_of_tools_cannot_be_confused() -> None:
    # Agent names may hold dots and colons, tool names may not.
    names = {
        tool_activity_type("a.b", "c"),
        tool_activity_type("a", "b_c"),
        reconcile_activity_type("a.b", "c"),
        tool_activity_type("a.b:reconcile", "c"),
    }

    assert len(names) == 4
    assert tool_activity_type("desk", "refund") == "desk.refund"
    assert reconcile_activity_type("desk", "refund") == "desk.refund:reconcile"


def test_the_workflow_id_names_the_whole_key() -> None:
    assert turn_workflow_id("n", "c", "r") == "turn/n/c/r"
