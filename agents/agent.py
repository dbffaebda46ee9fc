"""`Agent`: a model, its instructions and its tools, under a name.

A declaration that is checked when it is made; it runs nothing.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from perdure.agents.output import OutputType
from perdure.agents.tool import Tool
from perdure.contracts.canonical import canonical_json, encoded_bytes
from perdure.contracts.errors import AuthoringError
from perdure.contracts.ids import Identifier
from perdure.contracts.limits import (
    INSTRUCTIONS_BYTES_MAX,
    PREPARED_BLOB_BYTES_MAX,
    TOOLS_PER_TURN_MAX,
)
from perdure.contracts.model import Model
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ToolSpec

_IDENTIFIER: TypeAdapter[str] = TypeAdapter(Identifier)


class Agent:
    """Who answers a turn.

    `model` is a string such as `scripted:desk.yaml`, which the worker resolves, or an object with
    `async def respond(request, sink)`. `model_parameters` is JSON that is passed to the model.
    `output_type` (a pydantic model, or any type whose JSON schema is an object's) is what the final
    answer must fit; one that does not is asked for again, twice at most.
    """

    def __init__(
        self,
        name: str,
        model: str | Model,
        instructions: str = "",
        tools: Iterable[Tool] = (),
        *,
        model_timeout_s: float = 600.0,
        model_parameters: Mapping[str, Any] | None = None,
        output_type: Any = None,
    ) -> None:
        self.name = _checked_name(name)
        where = f"agent {name!r}"
        self.model = _checked_model(model, where)
        self.instructions = _checked_instructions(instructions, where)
        self._tools = _checked_tools(tools, where)
        if not (math.isfinite(model_timeout_s) and model_timeout_s > 0):
            raise AuthoringError(f"{where}: model_timeout_s must be over 0 and finite")
        self.model_timeout_s = model_timeout_s
        self.model_parameters = _checked_parameters(model_parameters or {}, where)
        self.output = None if output_type is None else OutputType(output_type, where)

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, model={self.model_name!r})"

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, as declared."""
        return tuple(self._tools.values())

    @property
    def model_name(self) -> str:
        """What is recorded: the string, the object's `name`, or the name of its class."""
        if isinstance(self.model, str):
            return self.model
        name = getattr(self.model, "name", None)
        return name if isinstance(name, str) and name else type(self.model).__name__

    def tool(self, name: str) -> Tool | None:
        """The tool of that name."""
        return self._tools.get(name)

    def specs(self, names: Collection[str] | None = None) -> tuple[ToolSpec, ...]:
        """What the model is told of the tools, in declared order; `names` narrows them."""
        return tuple(
            tool.spec for tool in self._tools.values() if names is None or tool.name in names
        )


def _checked_name(name: str) -> str:
    try:
        return _IDENTIFIER.validate_python(name, strict=True)
    except ValidationError as error:
        reason = error.errors(include_input=False)[0]["msg"]
        raise AuthoringError(f"agent {name!r}: its name {reason}") from error


def _checked_model(model: Any, where: str) -> str | Model:
    if isinstance(model, str):
        if not model.strip():
            raise AuthoringError(f"{where}: its model is an empty string")
        return model
    if isinstance(model, type):
        raise AuthoringError(f"{where}: its model is the class {model.__name__}, not an object")
    if not isinstance(model, Model):
        kind = type(model).__name__
        raise AuthoringError(f"{where}: its model, a {kind}, has no `respond(request, sink)`")
    return model


def _checked_instructions(instructions: str, where: str) -> str:
    size = encoded_bytes(instructions)
    if size > INSTRUCTIONS_BYTES_MAX:
        raise AuthoringError(
            f"{where}: its instructions have {size} encoded bytes, {INSTRUCTIONS_BYTES_MAX} fit"
        )
    return instructions


def _checked_tools(tools: Iterable[Any], where: str) -> dict[str, Tool]:
    checked: dict[str, Tool] = {}
    for tool in tools:
        if not isinstance(tool, Tool):
            name = getattr(tool, "__name__", type(tool).__name__)
            raise AuthoringError(f"{where}: {name!r} is not a tool; decorate it with @tool")
        if tool.name in checked:
            raise AuthoringError(f"{where}: two tools have the name {tool.name!r}")
        if tool.replay is ReplaySafety.RECONCILED and tool.reconcile_function is None:
            raise AuthoringError(
                f"{where}: tool {tool.name!r} is RECONCILED and has no reconcile function"
            )
        checked[tool.name] = tool
    if len(checked) > TOOLS_PER_TURN_MAX:
        raise AuthoringError(f"{where}: {len(checked)} tools, at most {TOOLS_PER_TURN_MAX} fit")
    size = encoded_bytes([tool.spec.model_dump(mode="json") for tool in checked.values()])
    if size > PREPARED_BLOB_BYTES_MAX:
        raise AuthoringError(
            f"{where}: its tools' schemas have {size} bytes, {PREPARED_BLOB_BYTES_MAX} fit"
        )
    return checked


def _checked_parameters(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    copied = dict(parameters)
    try:
        canonical_json(copied)
    except (TypeError, ValueError) as error:
        raise AuthoringError(f"{where}: model_parameters are not JSON: {error}") from error
    return copied
