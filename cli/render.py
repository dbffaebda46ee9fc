"""How the command line shows what it read: text of strangers is never markup or a control code."""

import json
import re
from typing import Final

from rich.console import Console
from rich.text import Text

from perdure.contracts.conversation import TranscriptEntry
from perdure.contracts.messages import (
    MediaPart,
    MessageKind,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from perdure.contracts.model import Usage
from perdure.contracts.turn import TurnRequest, TurnResult, TurnStatus

# Control codes could rewrite the screen, and marks of direction could disguise a text.
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_SPEAKERS: Final = {
    Role.USER: ("you", "bold cyan"),
    Role.ASSISTANT: ("agent", "bold green"),
    Role.TOOL: ("tool", "bold magenta"),
    Role.SYSTEM: ("system", "bold"),
}


def clean(text: str) -> str:
    """The text without what a terminal would act on."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def make_console() -> Console:
    """A console that takes no text for markup and breaks no line by itself."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def short(text: str, chars_max: int = 200) -> str:
    """One line of at most that many characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def call_line(name: str, arguments: str) -> Text:
    """A tool call."""
    return Text.assemble(("→ ", "dim"), (clean(name), "magenta"), (f" {short(arguments)}", "dim"))


def result_line(name: str, text: str, *, is_error: bool) -> Text:
    """A tool's result."""
    style = "yellow" if is_error else "dim"
    return Text.assemble(("← ", "dim"), (clean(name), "magenta"), (f" {short(text)}", style))


def print_entry(console: Console, entry: TranscriptEntry) -> None:
    """One message of a transcript."""
    speaker, style = _SPEAKERS[entry.message.role]
    if entry.message.kind is MessageKind.MARKER:
        speaker, style = "note", "bold yellow"
    if entry.message.kind is MessageKind.REPAIR:
        speaker, style = "repair", "bold yellow"
    console.print(Text.assemble((f"{entry.sequence:>4} ", "dim"), (speaker, style)))
    for part in entry.message.parts:
        console.print(Text("     ").append_text(_part(part)))


def _part(part: Part) -> Text:
    match part:
        case TextPart():
            return Text(clean(part.text).replace("\n", "\n     "))
        case MediaPart():
            return Text(f"({part.media_type}) {clean(part.url)}", "italic")
        case ThinkingPart():
            return Text(f"(thinking) {short(part.text)}", "dim italic")
        case ToolCallPart():
            return call_line(part.name, part.arguments_text or json.dumps(part.arguments))
        case ToolResultPart():
            return result_line(part.name, part.text, is_error=part.is_error)


def print_result(console: Console, result: TurnResult, request: TurnRequest) -> None:
    """How the turn ended, and how to go on with its conversation."""
    if result.status is not TurnStatus.COMPLETED:
        console.print(Text(f"{result.status.value}: {result.stop_reason}", "bold red"))
    facts = f"conversation {request.conversation_id} · {result.turn_id} · "
    console.print(Text(facts + usage_text(result.usage), "dim"))


def usage_text(usage: Usage) -> str:
    """Tokens, in words."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return f"{usage.input_tokens} tokens in{cached}, {usage.output_tokens} out"
