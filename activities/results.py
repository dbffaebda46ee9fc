"""Turning whatever a tool returned into a result that can be stored and shown (promise P12).

A tool that ran is never reported as failed because of what it returned: values that are no JSON are
written as text, what no database holds is replaced, what is too long is cut, each with a flag. The
whole result is kept beside the text for the model where that was cut.
"""

import base64
import json
import logging
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from perdure.agents import ToolReturn
from perdure.contracts.canonical import JSON_SEPARATORS, encoded_bytes, sanitise_text, sanitised
from perdure.contracts.errors import ToolError
from perdure.contracts.limits import TOOL_RESULT_BYTES_MAX, TOOL_STRUCTURED_BYTES_MAX
from perdure.contracts.tools import ResultReason, ResultStatus, ToolOutcome, head_for_model

SANITISED, CUT, NOT_JSON, DROPPED = "sanitised", "cut", "not_json", "dropped"
STRUCTURED_DROPPED: Final = "structured_dropped"

logger = logging.getLogger("perdure.activities")

_DEPTH_MAX: Final = 100


def outcome_of(value: Any) -> ToolOutcome:
    """The result of a tool that returned."""
    flags: set[str] = set()
    structured = None
    if isinstance(value, ToolReturn):
        structured = _structured(value.structured, flags)
        value = value.text
    text = value if isinstance(value, str) else _encode(value, flags)
    outcome = _bounded(text, flags, ResultStatus.OK, None)
    return outcome if structured is None else outcome.model_copy(update={"structured": structured})


def outcome_of_error(error: BaseException, *, may_have_happened: bool) -> ToolOutcome:
    """The result of a tool that raised: its message is for the model, and only in the ledger."""
    if isinstance(error, ToolError):
        text = f"error: {error.told}"
    else:
        text = f"error: {type(error).__name__}: {_description(error)}"
    if may_have_happened:
        stop = "" if text.endswith((".", "!", "?")) else "."
        text += f"{stop} The call may or may not have taken effect."
    return _bounded(text, set(), ResultStatus.ERROR, ResultReason.TOOL_ERROR)


def refused(reason: ResultReason, text: str) -> ToolOutcome:
    """The result of a call that was never valid; nothing is executed."""
    return _bounded(text, set(), ResultStatus.REFUSED, reason)


def _bounded(
    text: str, flags: set[str], status: ResultStatus, reason: ResultReason | None
) -> ToolOutcome:
    clean = sanitise_text(text)
    if clean != text:
        flags.add(SANITISED)
    shown = head_for_model(clean)
    full = None
    if shown != clean:
        flags.add(CUT)
        full = clean
        if len(clean.encode()) > TOOL_RESULT_BYTES_MAX:
            flags.add(DROPPED)
            full = clean.encode()[:TOOL_RESULT_BYTES_MAX].decode(errors="ignore")
        shown += f"\n[cut: {len(clean.encode())} bytes in all]"
    return ToolOutcome(
        status=status, reason=reason, text=shown, flags=tuple(sorted(flags)), full=full
    )


def _structured(value: Any, flags: set[str]) -> Any:
    """The content beside the text as plain JSON; what is no JSON or too large is dropped."""
    unfit: set[str] = set()
    try:
        plain = sanitised(_plain(value, unfit, 0))
        if not unfit and encoded_bytes(plain) <= TOOL_STRUCTURED_BYTES_MAX:
            return plain
    except Exception as error:  # The author's own iterators and serialisers: the call has run.
        logger.warning("structured content could not be read: %s", type(error).__name__)
    flags.add(STRUCTURED_DROPPED)
    return None


def _encode(value: Any, flags: set[str]) -> str:
    try:
        plain = _plain(value, flags, 0)
        return json.dumps(plain, separators=JSON_SEPARATORS, ensure_ascii=False, allow_nan=False)
    except Exception:  # The author's own iterators and serialisers run here: the call has run.
        flags.add(NOT_JSON)
        return _description(value)


def _plain(value: Any, flags: set[str], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise RecursionError
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _plain_float(value, flags)
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(), flags, depth + 1)
    if isinstance(value, (bytes, bytearray)):
        flags.add(NOT_JSON)
        return _plain_bytes(bytes(value))
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        plain = {_key(key, flags): _plain(item, flags, depth + 1) for key, item in items}
        if len(plain) != len(items):
            # Two keys with one name in JSON: as text nothing is lost.
            raise ValueError
        return plain
    if isinstance(value, AbstractSet):
        flags.add(NOT_JSON)
        items = [_plain(item, flags, depth + 1) for item in cast("AbstractSet[Any]", value)]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True, default=str))
    if isinstance(value, Sequence):
        return [_plain(item, flags, depth + 1) for item in cast("Sequence[Any]", value)]
    return _plain_other(value, flags, depth)


def _plain_float(value: float, flags: set[str]) -> float | str:
    if math.isfinite(value):
        return value
    flags.add(NOT_JSON)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _plain_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _plain_other(value: Any, flags: set[str], depth: int) -> Any:
    flags.add(NOT_JSON)
    try:
        known = to_jsonable_python(value)
    except PydanticSerializationError:
        return _description(value)
    # What pydantic passes through unchanged would come back here for ever.
    return _description(value) if known is value else _plain(known, flags, depth + 1)


def _key(key: Any, flags: set[str]) -> str:
    if isinstance(key, str):
        return key
    flags.add(NOT_JSON)
    return str(key)


def _description(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # A broken __str__ must not turn a call that ran into a failure.
        return f"<{type(value).__name__}>"
