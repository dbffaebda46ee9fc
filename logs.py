"""One log record is one line, as text or JSON, with the ids of the turn that it belongs to.

The ids come from the activity that runs (`bind`), from the record's own `extra`, or from Temporal's
records. Standard library only, and nothing here may put a prompt, an argument or a result into a
line: only known fields of a record are written.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO, cast

LogFormat = Literal["text", "json"]

ID_FIELDS: Final = ("turn", "step", "operation", "generation", "attempt")
TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
_TEMPORAL_EXTRAS: Final = ("temporal_activity", "temporal_workflow")

_QUIETER: Final = {
    # Its progress lines say nothing to who runs a worker.
    "alembic": logging.WARNING,
    # At DEBUG it writes whole activations: previews, and what callers sent.
    "temporalio.worker": logging.INFO,
    # At DEBUG these write requests and headers: prompts and keys.
    **dict.fromkeys(("openai", "anthropic", "google_genai", "botocore"), logging.INFO),
    **dict.fromkeys(("httpx", "httpx2", "httpcore", "httpcore2", "urllib3"), logging.INFO),
}

Ids = Callable[[], Mapping[str, Any]]

_bound: ContextVar[Ids | None] = ContextVar("perdure_log_ids", default=None)


def bind(ids: Ids) -> None:
    """Give every later record of this task, and of the tasks it starts, these ids.

    They are asked for when a record is written, so that a silent task pays nothing.
    """
    _bound.set(ids)


class IdFilter(logging.Filter):
    """Lets every record pass, with `turn`, `step`, `operation` and `attempt` where known."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add what is bound; what the record says itself wins."""
        ids = _bound.get()
        found: Mapping[str, Any] = ids() if ids is not None else {}
        for name, value in found.items():
            if name in ID_FIELDS and not hasattr(record, name):
                setattr(record, name, value)
        return True


class TextFormatter(logging.Formatter):
    """The usual line, with the ids behind it."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        ids = " ".join(f"{name}={value}" for name, value in _ids_of(record).items())
        line = super().formatMessage(record)
        return f"{line} [{ids}]" if ids else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII, so that no text can break a line or a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's known fields; Temporal's own become `temporal.*`."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_ids_of(record),
            **_temporal_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _OneLine(logging.StreamHandler[TextIO]):
    """Ours, so that a later call knows what to replace and leaves a host's handlers alone."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream if stream is not None else sys.stderr)
        self._follows_stderr = stream is None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line to where standard error is now."""
        if self._follows_stderr:
            self.stream = sys.stderr
        super().emit(record)


def configure_logs(
    level: str = "INFO", style: LogFormat = "text", stream: TextIO | None = None
) -> None:
    """Log the whole process's records to standard error; a later call replaces an earlier one."""
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if isinstance(handler, _OneLine)]:
        root.removeHandler(earlier)
    handler = _OneLine(stream)
    handler.addFilter(IdFilter())
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level)
    for name, least in _QUIETER.items():
        logging.getLogger(name).setLevel(max(least, root.level))


def _ids_of(record: logging.LogRecord) -> dict[str, Any]:
    found = {name: getattr(record, name, None) for name in ID_FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def _temporal_of(record: logging.LogRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for extra in _TEMPORAL_EXTRAS:
        details = getattr(record, extra, None)
        if isinstance(details, Mapping):
            for name, value in cast("Mapping[str, Any]", details).items():
                flat[f"temporal.{name}"] = value
    return flat
