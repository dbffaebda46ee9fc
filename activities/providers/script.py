"""The script of a scripted model: what may stand in its YAML or JSON file, and how it is found.

    record: calls.jsonl                       # optional: a line for each call of the model
    rules:
      - when: 'refund order (?P<order>\\d+)'  # a regular expression for the last user message
        steps:                                # one reply for each model step
          - calls: [{tool: refund_order, arguments: {order: "{order:int}"}}]
          - text: ["The desk ", "says: {results}"]
      - steps:
          - attempts:                         # one reply for each try; the last one repeats
              - error: {kind: unavailable, message: busy, retry_after_s: 0.5}
              - text: Hello.
        repeat: true                          # the last step repeats

Data only, checked when it is read; `scripted.py` acts on it.
"""

import importlib.resources
import importlib.util
import json
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from perdure.activities.providers.templates import RESERVED_NAMES, check_template
from perdure.contracts.canonical import canonical_json
from perdure.contracts.errors import AuthoringError
from perdure.contracts.model import FinishReason, Usage


class _ScriptPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Call(_ScriptPart):
    """A tool call. `arguments` is an object with templates, or the raw text a provider sent.

    Raw text is taken as it is, for malformed arguments. `id` is the provider's; it may repeat.
    """

    tool: str
    arguments: dict[str, JsonValue] | str = Field(default_factory=dict[str, JsonValue])
    id: str = ""

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: dict[str, JsonValue] | str) -> dict[str, JsonValue] | str:
        if isinstance(value, dict):
            canonical_json(value)
        return value


class Failure(_ScriptPart):
    """An error that the model reports, after what the reply streams."""

    kind: Literal["unavailable", "refused", "protocol"]
    message: str = "the script says so"
    retry_after_s: float | None = Field(default=None, ge=0)


class ScriptedUsage(_ScriptPart):
    """Tokens that the reply claims to have used."""

    input_tokens: int = Field(default=0, ge=0)
    output_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)

    def counted(self) -> Usage:
        """The same as a response has it."""
        return Usage.model_validate(self.model_dump())


class Reply(_ScriptPart):
    """One answer: thinking, then text, then calls, then the end or an error.

    A list of texts is streamed piece by piece. `delay_s` passes before the first piece,
    `chunk_delay_s` before each further one. `hold_file` stops the stream after
    `hold_after_chunks` pieces of text until that file exists. `final_event: false` ends the stream
    without its final event, which is a protocol error.
    """

    text: str | tuple[str, ...] | None = None
    thinking: str | tuple[str, ...] | None = None
    calls: tuple[Call, ...] = ()
    delay_s: float = Field(default=0.0, ge=0)
    chunk_delay_s: float = Field(default=0.0, ge=0)
    hold_file: Path | None = None
    hold_after_chunks: int = Field(default=0, ge=0)
    error: Failure | None = None
    finish_reason: FinishReason | None = None
    usage: ScriptedUsage = ScriptedUsage()
    final_event: bool = True

    @model_validator(mode="after")
    def _check_error(self) -> Self:
        if self.error is not None and (self.calls or not self.final_event):
            raise ValueError("a reply with an error has no calls and no final event of its own")
        return self

    @property
    def text_chunks(self) -> tuple[str, ...]:
        """The pieces of the text."""
        return _chunks(self.text)

    @property
    def thinking_chunks(self) -> tuple[str, ...]:
        """The pieces of the reasoning."""
        return _chunks(self.thinking)


class Attempts(_ScriptPart):
    """The replies of one step by its try; the last one repeats."""

    attempts: tuple[Reply, ...] = Field(min_length=1)


# In brackets, so that they can be told from the fields in the place of an error.
_REPLY_TAG: Final = "<reply>"
_ATTEMPTS_TAG: Final = "<attempts>"


def _step_tag(value: Any) -> str:
    if isinstance(value, Attempts) or (isinstance(value, dict) and "attempts" in value):
        return _ATTEMPTS_TAG
    return _REPLY_TAG


Step = Annotated[
    Annotated[Reply, Tag(_REPLY_TAG)] | Annotated[Attempts, Tag(_ATTEMPTS_TAG)],
    Discriminator(_step_tag),
]


class Rule(_ScriptPart):
    """Replies, step by step, for the messages that `when` is found in; without `when` for all."""

    when: str | None = None
    steps: tuple[Step, ...] = Field(min_length=1)
    repeat: bool = False

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        groups = _group_names(self.when)
        for reply in self.every_reply():
            for template in (*reply.text_chunks, *_argument_objects(reply)):
                check_template(template, groups)
        return self

    def every_reply(self) -> tuple[Reply, ...]:
        """The replies of all steps and tries."""
        return tuple(
            reply
            for step in self.steps
            for reply in (step.attempts if isinstance(step, Attempts) else (step,))
        )

    def match(self, message: str) -> re.Match[str] | None:
        """The match in the message; its groups are what templates may name."""
        return re.search(self.when or "", message)


class Script(_ScriptPart):
    """A whole file. The first rule that matches is the one; there may be none."""

    rules: tuple[Rule, ...] = ()
    record: Path | None = None


def parse_script(data: Any, where: str) -> Script:
    """Check a script. Raises AuthoringError that says where it is wrong."""
    try:
        return Script.model_validate({} if data is None else data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        first = problems[0]
        names = [str(item) for item in first["loc"] if item not in (_REPLY_TAG, _ATTEMPTS_TAG)]
        place = ".".join(names) or "the script"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise AuthoringError(f"{where}: {place}: {first['msg']}{more}") from error


def read_script(path: str) -> Script:
    """Read a script file: YAML, or JSON where the name ends in `.json`. Raises AuthoringError.

    The path is taken from the current folder. If there is no such file and its first segment is an
    importable package, as in `perdure.examples/order_desk.yaml`, it is a resource of that package.
    """
    where = f"script {path!r}"
    text = _read_text(path, where)
    try:
        data = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise AuthoringError(f"{where} cannot be parsed: {reason}") from error
    return parse_script(data, where)


def _read_text(path: str, where: str) -> str:
    package, _, inside = path.partition("/")
    try:
        if inside and not Path(path).exists() and _is_package(package):
            return importlib.resources.files(package).joinpath(inside).read_text("utf-8")
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise AuthoringError(f"{where} cannot be read: {reason}") from error


def _is_package(name: str) -> bool:
    if not all(segment.isidentifier() for segment in name.split(".")):
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.submodule_search_locations is not None


def _chunks(text: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text or ()


def _argument_objects(reply: Reply) -> tuple[dict[str, JsonValue], ...]:
    return tuple(call.arguments for call in reply.calls if isinstance(call.arguments, dict))


def _group_names(when: str | None) -> frozenset[str]:
    try:
        pattern = re.compile(when or "")
    except re.error as error:
        raise ValueError(f"`when` is no regular expression: {error}") from error
    for name in RESERVED_NAMES:
        if name in pattern.groupindex:
            raise ValueError(f"a group of `when` cannot have the name {name!r}")
    numbers = (str(number) for number in range(pattern.groups + 1))
    return frozenset((*numbers, *pattern.groupindex))
