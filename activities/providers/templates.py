"""The templates of a scripted model: `{1}`, `{order}`, `{results}`, `{result:refund_order}`.

`{{` and `}}` stand for braces. A value that is one placeholder with a type, `"{1:int}"`, becomes a
number. A template names only what it may know; nothing is evaluated.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from perdure.contracts.errors import ModelScriptError

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}:]*)(?::(?P<detail>[^{}]*))?\}|[{}]")
_TYPES: Final[dict[str, Callable[[str], int | float]]] = {"int": int, "float": float}
RESERVED_NAMES: Final = ("result", "results")


@dataclass(frozen=True)
class Values:
    """What a template may name: the groups of the match and the results of tools.

    Groups are there by number (as text) and by name. `results` are those of the latest step;
    `results_by_tool` those of the latest step that called the tool.
    """

    groups: Mapping[str, str]
    results: tuple[str, ...] = ()
    results_by_tool: Mapping[str, tuple[str, ...]] | None = None


def check_template(value: JsonValue, groups: frozenset[str]) -> None:
    """Raise ValueError for a brace without its partner or a name that is not known."""
    if isinstance(value, str):
        for token in _TOKEN.finditer(value):
            _check_token(token, groups)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_template(item, groups)


def render_text(template: str, values: Values) -> str:
    """Fill in one text. Raises ModelScriptError for a value that is not there."""

    def fill(token: re.Match[str]) -> str:
        return token[0][0] if token["name"] is None else str(_look_up(token, values))

    return _TOKEN.sub(fill, template)


def render_json(value: JsonValue, values: Values) -> JsonValue:
    """Fill in every text of JSON data; names of fields stay as they are."""
    if isinstance(value, str):
        whole = _TOKEN.fullmatch(value)
        if whole is not None and whole["name"] is not None:
            return _look_up(whole, values)
        return render_text(value, values)
    if isinstance(value, dict):
        return {name: render_json(item, values) for name, item in value.items()}
    if isinstance(value, list):
        return [render_json(item, values) for item in value]
    return value


def _check_token(token: re.Match[str], groups: frozenset[str]) -> None:
    name, detail = token["name"], token["detail"]
    if name is None:
        if len(token[0]) == 1:
            raise ValueError("a single brace; write {{ or }} for a brace")
    elif name == "result":
        if not detail:
            raise ValueError("{result:TOOL} needs the name of a tool")
    elif name == "results":
        if detail is not None:
            raise ValueError("{results} takes no detail; for one tool write {result:TOOL}")
    elif name not in groups:
        raise ValueError(f"{{{name}}} is no group of `when`; a brace is written {{{{ or }}}}")
    elif detail is not None and detail not in _TYPES:
        raise ValueError(f"{token[0]}: a group may have the type {' or '.join(_TYPES)}")


def _look_up(token: re.Match[str], values: Values) -> str | int | float:
    name, detail = token["name"], token["detail"]
    if name == "results":
        return "\n".join(values.results)
    if name == "result":
        results = (values.results_by_tool or {}).get(detail)
        if results is None:
            raise ModelScriptError(f"{token[0]}: the tool has no result in this turn")
        return "\n".join(results)
    text = values.groups[name]
    if detail is None:
        return text
    try:
        return _TYPES[detail](text)
    except ValueError:
        raise ModelScriptError(f"{token[0]}: the matched text is not of that type") from None
