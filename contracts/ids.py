"""Identities: their alphabets and how they are derived (DESIGN 2).

Derived, never random, and never from Temporal's run id, activity id or attempt: a reset changes all
three. A provider's own call id is never a key.
"""

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from perdure.contracts.canonical import digest_parts
from perdure.contracts.limits import ID_CHARS_MAX, TOOL_NAME_CHARS_MAX

DEFAULT_NAMESPACE: Final = "default"

_ID = re.compile(rf"[A-Za-z0-9_.:-]{{1,{ID_CHARS_MAX}}}")
_NAMESPACE = re.compile(rf"[A-Za-z0-9_.-]{{1,{ID_CHARS_MAX}}}")
_TOOL_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{TOOL_NAME_CHARS_MAX}}}")


def _matching(pattern: re.Pattern[str], rule: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise PydanticCustomError("invalid_identifier", "must be {rule}", {"rule": rule})
        return value

    return AfterValidator(check)


Identifier = Annotated[str, _matching(_ID, f"1 to {ID_CHARS_MAX} of A-Z a-z 0-9 _ . : -")]
Namespace = Annotated[str, _matching(_NAMESPACE, f"1 to {ID_CHARS_MAX} of A-Z a-z 0-9 _ . -")]
ToolName = Annotated[str, _matching(_TOOL_NAME, f"1 to {TOOL_NAME_CHARS_MAX} of A-Z a-z 0-9 _ -")]


class TurnKey(BaseModel):
    """What identifies a turn: the same key is the same turn under any workflow id."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, extra="ignore")

    namespace: Namespace = DEFAULT_NAMESPACE
    conversation_id: Identifier
    request_id: Identifier

    @property
    def turn_id(self) -> str:
        """`turn_` and 32 hex digits, derived from the key."""
        return derive_turn_id(self.namespace, self.conversation_id, self.request_id)


def derive_turn_id(namespace: str, conversation_id: str, request_id: str) -> str:
    """The turn's id, from what the request says."""
    return "turn_" + digest_parts("perdure.turn.v1", (namespace, conversation_id, request_id))[:32]


def derive_operation_id(turn_id: str, step: int, index: int) -> str:
    """The id of call `index` (0-based) of model step `step` (1-based): also the idempotency key."""
    return "toolop_" + digest_parts("perdure.operation.v1", (turn_id, step, index))[:32]


def turn_workflow_id(namespace: str, conversation_id: str, request_id: str) -> str:
    """The workflow id our own clients use."""
    return f"turn/{namespace}/{conversation_id}/{request_id}"


def tool_activity_type(agent: str, tool: str) -> str:
    """The Temporal activity type of a tool. Tool names have no dot, so this is unambiguous."""
    return f"{agent}.{tool}"


def reconcile_activity_type(agent: str, tool: str) -> str:
    """The activity type of a tool's reconcile function. Tool names have no colon."""
    return f"{agent}.{tool}:reconcile"
