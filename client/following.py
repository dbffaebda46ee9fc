"""Following one turn by polling the ledger: text as it becomes durable, then facts.

A newer attempt supersedes an older one: readers get `Restarted` and never doubled text (P8). Must
not import a store: it reads through a `LedgerReader`.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

from perdure.contracts.events import LedgerEvent, ModelAnswered
from perdure.contracts.ids import TurnKey
from perdure.contracts.messages import TextPart
from perdure.contracts.views import PartialView, RecordedEvent

POLL_S: Final = 0.05
PAGE: Final = 500


class LedgerReader(Protocol):
    """What following needs; `stores.queries.Reader` has it."""

    def events(
        self, namespace: str, conversation_id: str, after: int = 0, limit: int = 500
    ) -> list[RecordedEvent]:
        """Events of a conversation, in commit order."""
        ...

    def partials(self, turn_id: str) -> list[PartialView]:
        """What the attempts in flight have streamed."""
        ...


@dataclass(frozen=True)
class TextPiece:
    """New text of a model step."""

    step: int
    text: str


@dataclass(frozen=True)
class Restarted:
    """A newer attempt of the step has begun: what it had shown is void."""

    step: int


Follow = TextPiece | Restarted | LedgerEvent


async def follow(
    reader: LedgerReader, key: TurnKey, *, poll_s: float = POLL_S
) -> AsyncGenerator[Follow]:
    """Yield the turn's text and events until its terminal event.

    Waits for a turn that has not opened yet; the caller bounds it with a time-out.
    """
    shown = _Shown()
    after = 0
    while True:
        partials = await asyncio.to_thread(reader.partials, key.turn_id)
        page = await asyncio.to_thread(
            reader.events, key.namespace, key.conversation_id, after, PAGE
        )
        if not page:
            # Only when no fact is newer: a partial that was read before its answer is stale then.
            for piece in shown.of_partials(partials):
                yield piece
            await asyncio.sleep(poll_s)
            continue
        for recorded in page:
            after = recorded.ordinal
            event = recorded.event
            if event.turn_id != key.turn_id:
                continue
            for piece in shown.of_event(event):
                yield piece
            yield event
            if event.kind == "turn_ended":
                return


class _Shown:
    def __init__(self) -> None:
        self._texts: dict[int, tuple[int, str]] = {}

    def of_partials(self, partials: list[PartialView]) -> list[TextPiece | Restarted]:
        pieces: list[TextPiece | Restarted] = []
        for partial in partials:
            if partial.subject.startswith("step"):
                step = int(partial.subject.removeprefix("step"))
                pieces.extend(self._advance(step, partial.attempt, partial.text))
        return pieces

    def of_event(self, event: LedgerEvent) -> list[TextPiece | Restarted]:
        if not isinstance(event, ModelAnswered):
            return []
        text = "".join(part.text for part in event.parts if isinstance(part, TextPart))
        return self._advance(event.step, event.attempt, text)

    def _advance(self, step: int, attempt: int, text: str) -> list[TextPiece | Restarted]:
        shown_attempt, shown = self._texts.get(step, (attempt, ""))
        if attempt < shown_attempt:
            return []
        self._texts[step] = (attempt, text)
        if text.startswith(shown) and attempt == shown_attempt:
            new = text[len(shown) :]
            return [TextPiece(step, new)] if new else []
        pieces: list[TextPiece | Restarted] = [Restarted(step)] if shown else []
        return [*pieces, TextPiece(step, text)] if text else pieces
