"""Canonical JSON, sanitised text and length-prefixed digests.

Canonical JSON (DESIGN 6): sorted keys, no white space, shortest floats, exact integers of any size.
It must not accept what a ledger cannot hold: NaN, infinity, keys that are no text.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, cast

JSON_SEPARATORS = (",", ":")

_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=JSON_SEPARATORS, ensure_ascii=False, allow_nan=False
)


def sanitise_text(text: str) -> str:
    """Return text both databases store: NUL becomes U+2400, a lone surrogate U+FFFD (P12)."""
    if "\x00" in text:
        text = text.replace("\x00", "\u2400")
    try:
        text.encode()
    except UnicodeEncodeError:
        # A proper pair is one character; only the lone halves are replaced.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def sanitised(value: Any) -> Any:
    """A JSON value with every text, also the keys, sanitised."""
    if isinstance(value, str):
        return sanitise_text(value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {sanitise_text(key): sanitised(item) for key, item in items}
    if isinstance(value, list):
        return [sanitised(item) for item in cast("list[Any]", value)]
    return value


def nests_deeper(value: Any, levels: int) -> bool:
    """Whether arrays and objects lie in each other deeper than `levels`; not recursive itself."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                inner.extend(cast("dict[Any, Any]", item).values())
            elif isinstance(item, (list, tuple)):
                inner.extend(cast("list[Any]", item))
        if not inner:
            return False
        layer = inner
    return any(isinstance(item, (dict, list, tuple)) for item in layer)


def canonical_json(value: Any) -> str:
    """Encode plain JSON data canonically.

    Raises ValueError for NaN and infinity, TypeError for what is not JSON.
    """
    _refuse_other_keys(value)
    return _ENCODER.encode(value)


def _refuse_other_keys(value: Any) -> None:
    # The encoder would turn a number into a key, and sort it as a number: the same text, read and
    # encoded again, would come out in another order.
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError("a key of a JSON object must be text")
            _refuse_other_keys(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            _refuse_other_keys(item)


def encoded_bytes(value: Any) -> int:
    """Bytes of the value as default JSON, where every character outside ASCII is escaped."""
    return len(json.dumps(value, separators=JSON_SEPARATORS))


def digest_parts(domain: str, parts: Iterable[str | bytes | int]) -> str:
    """SHA-256 (hex) over the length-prefixed domain and parts; integers as unsigned 64 bit."""
    state = hashlib.sha256()
    for part in (domain, *parts):
        if isinstance(part, int):
            data = part.to_bytes(8, "big")
        else:
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()


def content_digest(text: str) -> str:
    """`sha256:` and the hex digest of a text's UTF-8 bytes."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
