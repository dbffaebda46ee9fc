"""Which media a provider takes by URL, asked before any request is made.

Only what the provider fetches itself is allowed: a client library would quietly download the rest
in the worker, from whatever address a user wrote. `docs/providers.md` shows this table.
"""

from collections.abc import Iterable
from typing import Final

from perdure.contracts.errors import ModelPartUnsupported
from perdure.contracts.messages import MediaPart, Message

_IMAGES: Final = ("image/",)

# By the module of pydantic-ai that speaks the protocol: media types, or their beginnings with "/".
MEDIA_BY_PROTOCOL: Final[dict[str, tuple[str, ...]]] = {
    "openai chat": _IMAGES,
    "openai responses": ("image/", "application/", "text/"),
    "anthropic": ("image/", "application/pdf"),
    "groq": _IMAGES,
    "mistral": ("image/", "application/pdf"),
    "huggingface": _IMAGES,
    "google-cloud": ("image/", "application/pdf", "audio/", "video/"),
}


def check_parts(protocol: str, messages: Iterable[Message]) -> None:
    """Raises ModelPartUnsupported for media that this protocol does not take by URL."""
    taken = MEDIA_BY_PROTOCOL.get(protocol, ())
    for message in messages:
        for part in message.parts:
            if isinstance(part, MediaPart) and not _takes(taken, part.media_type):
                shown = ", ".join(_shown(kind) for kind in taken) or "none"
                raise ModelPartUnsupported(
                    f"the model's provider ({protocol}) does not take this media type by URL; "
                    f"it takes: {shown}"
                )


def _takes(taken: tuple[str, ...], media_type: str) -> bool:
    return any(
        media_type.startswith(kind) if kind.endswith("/") else media_type == kind for kind in taken
    )


def _shown(kind: str) -> str:
    return f"{kind}*" if kind.endswith("/") else kind
