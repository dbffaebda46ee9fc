"""From a function's type hints and docstring to a JSON schema, and from JSON to its arguments.

Pydantic does both. Nothing here calls the function or knows what a tool is.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, PydanticUndefinedAnnotation, PydanticUserError
from pydantic import create_model as create_pydantic_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from perdure.agents.context import BlockingToolContext, ToolContext
from perdure.contracts.errors import AuthoringError

_ARGS_HEADING: Final = re.compile(r"(Args|Arguments|Parameters):\s*")
_ARGS_ENTRY: Final = re.compile(r"(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_NAMED_KINDS: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Signature:
    """A function's parameters: type hint and default by name, and which one takes the context."""

    parameters: dict[str, tuple[Any, Any]]
    context_parameter: str | None
    wants_blocking: bool


@dataclass(frozen=True)
class Documentation:
    """A docstring without its section of arguments, and what that section says of each."""

    description: str
    parameters: dict[str, str]


class _ToolJsonSchema(GenerateJsonSchema):
    # A default that JSON cannot say is left out; the function still has it.
    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012
        "skipped-choice",
        "non-serializable-default",
    }

    def field_title_should_be_set(self, schema: Any) -> bool:
        # A title that repeats the name only costs tokens.
        return False


class ArgumentsSchema:
    """The JSON schema of a function's arguments, and their validation. Surplus is refused."""

    def __init__(self, signature: Signature, described: dict[str, str], where: str) -> None:
        # Generated names keep clear of what pydantic reserves; the alias is the real name.
        self._fields = {f"argument_{n}": name for n, name in enumerate(signature.parameters)}
        definitions: dict[str, Any] = {
            field: signature.parameters[name] for field, name in self._fields.items()
        }
        config = ConfigDict(extra="forbid", alias_generator=self._fields.__getitem__)
        try:
            self._model: type[BaseModel] = create_pydantic_model(
                "Arguments", __config__=config, **definitions
            )
            self.json_schema = _object_schema(self._model, described)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            reason = str(error).partition("\n")[0]
            raise AuthoringError(f"{where}: no JSON schema for its parameters: {reason}") from error

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the function. Raises pydantic's ValidationError."""
        values = self._model.model_validate(arguments)
        return {name: getattr(values, field) for field, name in self._fields.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in order."""
        return tuple(self._fields.values())


def read_signature(function: Callable[..., Any], where: str) -> Signature:
    """Read the parameters. Raises AuthoringError for what cannot be described to a model."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise AuthoringError(f"{where}: a type hint cannot be resolved: {error}") from error
    parameters: dict[str, tuple[Any, Any]] = {}
    contexts: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in _NAMED_KINDS:
            raise AuthoringError(f"{where}: parameter {name!r} cannot be passed by name")
        if name not in hints:
            raise AuthoringError(f"{where}: parameter {name!r} has no type hint")
        if _context_classes(hints[name]):
            contexts.append(name)
            continue
        required = parameter.default is inspect.Parameter.empty
        parameters[name] = (hints[name], ... if required else parameter.default)
    if len(contexts) > 1:
        raise AuthoringError(f"{where}: more than one parameter takes the context: {contexts}")
    context = contexts[0] if contexts else None
    wants_blocking = context is not None and BlockingToolContext in _context_classes(hints[context])
    return Signature(parameters, context, wants_blocking)


def read_docstring(function: Callable[..., Any]) -> Documentation:
    """Split a docstring in Google's style; the section `Args:` describes parameters."""
    kept: list[str] = []
    section: list[str] = []
    inside = False
    for line in (inspect.getdoc(function) or "").splitlines():
        if _ARGS_HEADING.fullmatch(line):
            inside = True
            continue
        inside = inside and (not line.strip() or line[0].isspace())
        (section if inside else kept).append(line)
    description = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    return Documentation(description, _read_entries(section))


def _read_entries(section: list[str]) -> dict[str, str]:
    lines = [line for line in section if line.strip()]
    indent = min((_indent_of(line) for line in lines), default=0)
    entries: dict[str, str] = {}
    current = ""
    for line in lines:
        entry = _ARGS_ENTRY.fullmatch(line.strip())
        if entry and _indent_of(line) == indent:
            current = entry[1]
            entries[current] = entry[2].strip()
        elif current:
            entries[current] = f"{entries[current]} {line.strip()}".strip()
    return entries


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def _object_schema(model: type[BaseModel], described: dict[str, str]) -> dict[str, Any]:
    schema = model.model_json_schema(schema_generator=_ToolJsonSchema)
    schema.pop("title", None)
    properties: dict[str, dict[str, Any]] = schema.setdefault("properties", {})
    for name, description in described.items():
        if name in properties:
            # A description in the type hint is nearer to the parameter than the docstring.
            properties[name].setdefault("description", description)
    return schema


def _context_classes(hint: Any) -> set[type[Any]]:
    origin = typing.get_origin(hint)
    members: tuple[Any, ...] = (hint,)
    if origin is typing.Union or origin is types.UnionType:
        members = typing.get_args(hint)
    return {member for member in members if member in (ToolContext, BlockingToolContext)}
