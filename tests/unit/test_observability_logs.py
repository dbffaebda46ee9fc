"""Log lines: their ids, their two forms, and what never gets into one."""

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.activities.log_ids import ids_of
from perdure.contracts.errors import SetupError
from perdure.contracts.ids import derive_operation_id, derive_turn_id
from perdure.logs import JsonFormatter, bind, configure_logs
from perdure.settings import load_settings

logger = logging.getLogger("perdure.test")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """What was logged, parsed."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_records_carry_the_ids_of_their_task_and_of_no_other() -> None:
    stream = io.StringIO()
    configure_logs("INFO", "json", stream)

    async def tool() -> None:
        logger.info("from a task of the activity")

    async def activity(turn: str) -> None:
        bind(lambda: {"turn": turn, "step": 1, "attempt": 2})
        await asyncio.create_task(tool())

    await asyncio.gather(activity("turn_a"), activity("turn_b"))
    logger.info("from outside")

    first, second, outside = lines(stream)
    assert (first["turn"], second["turn"]) == ("turn_a", "turn_b")
    assert (first["step"], first["attempt"]) == (1, 2)
    assert "turn" not in outside


async def test_what_a_record_says_itself_wins() -> None:
    stream = io.StringIO()
    configure_logs("INFO", "json", stream)

    bind(lambda: {"turn": "turn_a", "step": 1})
    logger.info("about another", extra={"turn": "turn_b"})

    (line,) = lines(stream)
    assert (line["turn"], line["step"]) == ("turn_b", 1)


def test_a_json_line_is_one_line_of_ascii_whatever_is_logged() -> None:
    # Formatted by itself: no test runner's own capture has to carry a lone surrogate.
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        error = sys.exc_info()
    said = "two\nlines, %s and \udc80"
    record = logging.LogRecord("perdure.test", logging.ERROR, "", 1, said, ("ünïcode",), error)

    text = JsonFormatter().format(record)

    line = json.loads(text)
    assert text.isascii()
    assert "\n" not in text
    assert line["message"] == "two\nlines, ünïcode and \udc80"
    assert (line["level"], line["logger"]) == ("ERROR", "perdure.test")
    assert line["exception"].startswith("Traceback")
    assert line["time"].endswith("Z")


def test_temporals_extras_are_flattened_and_no_others_are_written() -> None:
    stream = io.StringIO()
    configure_logs("INFO", "json", stream)

    activity = {"activity_type": "call_model", "attempt": 3}
    logger.info("x", extra={"temporal_activity": activity, "prompt": "canary"})

    (line,) = lines(stream)
    assert line["temporal.activity_type"] == "call_model"
    assert line["temporal.attempt"] == 3
    assert "canary" not in stream.getvalue()


def test_a_text_line_ends_with_its_ids() -> None:
    stream = io.StringIO()
    configure_logs("INFO", "text", stream)

    logger.info("said", extra={"turn": "turn_a", "operation": "toolop_b"})
    logger.info("plain")

    said, plain = stream.getvalue().splitlines()
    assert said.endswith("INFO perdure.test said [turn=turn_a operation=toolop_b]")
    assert plain.endswith("INFO perdure.test plain")


def test_a_second_call_replaces_our_handler_and_leaves_a_hosts() -> None:
    host = logging.NullHandler()
    logging.getLogger().addHandler(host)
    first, second = io.StringIO(), io.StringIO()

    configure_logs("INFO", "text", first)
    configure_logs("INFO", "json", second)
    logger.info("once")

    assert first.getvalue() == ""
    assert len(lines(second)) == 1
    assert host in logging.getLogger().handlers


@pytest.mark.parametrize("name", ["temporalio.worker._workflow", "openai._base_client", "httpcore"])
def test_libraries_that_write_content_at_debug_are_kept_quiet(name: str) -> None:
    stream = io.StringIO()
    configure_logs("DEBUG", "text", stream)

    logging.getLogger(name).debug("canary")
    logger.debug("ours")

    assert "ours" in stream.getvalue()
    assert "canary" not in stream.getvalue()


def test_an_activitys_input_tells_turn_step_and_operation() -> None:
    turn = {"conversation_id": "c1", "request_id": "r1"}
    turn_id = derive_turn_id("default", "c1", "r1")

    assert ids_of({"turn": turn, "step": 2, "index": 0}, 3) == {
        "attempt": 3,
        "turn": turn_id,
        "step": 2,
        "operation": derive_operation_id(turn_id, 2, 0),
    }
    assert ids_of({"turn": turn}, 1) == {"attempt": 1, "turn": turn_id}


@pytest.mark.parametrize("value", [None, [], {}, {"turn": 7}, {"turn": {"request_id": "?"}}])
def test_an_odd_input_merely_has_no_ids(value: Any) -> None:
    assert ids_of(value, 1) == {"attempt": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PERDURE_LOG_LEVEL", "LOUD"),
        ("PERDURE_LOG_FORMAT", "xml"),
        ("PERDURE_METRICS_PORT", "70000"),
        ("PERDURE_HEALTH_PORT", "http"),
        ("PERDURE_OTEL", "maybe"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(SetupError, match=f"^{name}: ") as caught:
        load_settings()

    assert value not in str(caught.value)
