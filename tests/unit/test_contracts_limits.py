"""The bounds of DESIGN 10, written out, and that they fit what Temporal carries."""

import json

import pytest

from perdure.contracts import limits
from perdure.contracts.calls import CallRef, StepKind, StepReply
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.timing import Timing

KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ID_CHARS_MAX", 128),
        ("TOOL_NAME_CHARS_MAX", 64),
        ("MESSAGE_BYTES_MAX", 256 * KIB),
        ("RECORDER_COMMANDS_MAX", 512),
        ("RECORDER_BYTES_MAX", 8 * MIB),
        ("RECORDER_DELIVERIES_MAX", 256),
        ("WINDOW_MESSAGES_MAX", 4096),
        ("TOOL_TEXT_BYTES_MAX", 50 * KIB),
        ("TOOL_TEXT_LINES_MAX", 2000),
        ("TOOL_RESULT_BYTES_MAX", 16 * MIB),
        ("ANSWER_IN_RESULT_BYTES_MAX", 16 * KIB),
        ("CALLS_PER_STEP_MAX", 128),
        ("MODEL_STEPS_DEFAULT", 64),
        ("ERROR_CHARS_MAX", 300),
        ("PARTIAL_FLUSH_BYTES", 8 * KIB),
        ("PARTIAL_FLUSH_S", 0.08),
        ("CONTINUE_AS_NEW_EVENTS", 4000),
        ("CONTINUE_AS_NEW_BYTES", 8 * MIB),
    ],
)
def test_a_bound_is_what_the_design_says(name: str, value: float) -> None:
    assert getattr(limits, name) == value


def test_every_bound_is_positive() -> None:
    bounds = {name: value for name, value in vars(limits).items() if name.isupper()}

    assert [name for name, value in bounds.items() if value <= 0] == []


def test_the_largest_reply_of_a_step_fits_into_a_payload() -> None:
    call = CallRef(
        index=limits.CALLS_PER_STEP_MAX,
        tool="t" * limits.TOOL_NAME_CHARS_MAX,
        safety=ReplaySafety.RECONCILED,
        timeout_s=12345.678,
        preview="\x00" * limits.PREVIEW_CHARS_MAX,
    )
    reply = StepReply(
        kind=StepKind.CALLS,
        agent="a" * limits.ID_CHARS_MAX,
        store="s" * 64,
        epoch=2**31,
        seq=2**31,
        calls=(call,) * limits.CALLS_PER_STEP_MAX,
    )

    assert len(json.dumps(reply.encode())) < limits.TEMPORAL_PAYLOAD_BYTES_MAX / 4


def test_waits_derive_from_the_heartbeat_timeout() -> None:
    timing = Timing(heartbeat_timeout_s=1)

    assert timing.alive_renewal_s == 0.5
    assert timing.holder_lost_s == 2
    assert Timing().alive_renewal_s == 5
    assert Timing().holder_lost_s == 20


def test_the_default_timeouts_are_those_of_the_design() -> None:
    timing = Timing()

    assert timing.heartbeat_timeout_s == 10
    assert timing.tool_timeout_s == 300
    assert timing.model_timeout_s == 600
    assert timing.cancel_grace_s == 5
