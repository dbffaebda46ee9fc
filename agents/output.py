"""Structured output: the type that an agent's final answer has to fit.

Reads an answer's text and says what is wrong with it in words for the model. It runs no code but
the type's own validation.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from perdure.contracts.canonical import canonical_json
from perdure.contracts.errors import AuthoringError
from perdure.contracts.limits import OUTPUT_PROBLEM_CHARS_MAX

# Models like to put JSON into a block of Markdown, whatever they were asked for.
_FENCED: Final = re.compile(r"\A```[a-zA-Z]*\s*\n(?P<json>.*?)\n?```\Z", re.DOTALL)
_PROBLEMS_SHOWN_MAX: Final = 10


@dataclass(frozen=True)
class ReadOutput:
    """Either the canonical JSON of the validated answer, or what is wrong with it."""

    json: str | None = None
    problem: str | None = None


class OutputType:
    """A type whose JSON schema is an object's."""

    def __init__(self, kind: Any, where: str) -> None:
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(kind)
            self.schema: dict[str, Any] = self._adapter.json_schema()
        except Exception as error:
            # The edge to the author's type, whose schema code may raise anything.
            name = getattr(kind, "__name__", type(kind).__name__)
            raise AuthoringError(
                f"{where}: its output type {name} has no JSON schema: {type(error).__name__}"
            ) from error
        if self.schema.get("type") != "object":
            raise AuthoringError(f"{where}: its output type must be an object, such as a BaseModel")

    def read(self, text: str) -> ReadOutput:
        """Validate an answer's text. It never raises."""
        stripped = text.strip()
        fenced = _FENCED.match(stripped)
        try:
            value = self._adapter.validate_json(fenced["json"] if fenced else stripped)
            plain = self._adapter.dump_python(value, mode="json", by_alias=True)
            return ReadOutput(json=canonical_json(plain))
        except ValidationError as error:
            return ReadOutput(problem=_problem(error))
        except Exception as error:
            # The author's validators run here, and the answer is bought already.
            return ReadOutput(problem=_ask_again(f"it cannot be read ({type(error).__name__})"))


def _problem(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [
        f"{'.'.join(str(item) for item in one['loc']) or 'the answer'}: {one['msg']}"
        for one in found[:_PROBLEMS_SHOWN_MAX]
    ]
    return _ask_again("; ".join(lines))


def _ask_again(problem: str) -> str:
    return (
        f"The answer does not fit the required JSON schema: {problem[:OUTPUT_PROBLEM_CHARS_MAX]}. "
        "Answer again with nothing but one JSON object that fits it."
    )
