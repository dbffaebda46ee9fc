"""Every bound of the system, in one file, asserted together (DESIGN 10, promise P11).

Sizes count *encoded* JSON bytes unless the name says otherwise. Nothing else may define a bound.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

ID_CHARS_MAX: Final = 128
TOOL_NAME_CHARS_MAX: Final = 64

MESSAGE_BYTES_MAX: Final = 256 * KIB
ARGUMENTS_BYTES_MAX: Final = 256 * KIB
# Readers of JSON give up at a depth of their own; ours lies well under it.
NESTING_LEVELS_MAX: Final = 100
MEDIA_URL_CHARS_MAX: Final = 2048
PARAMETERS_BYTES_MAX: Final = 16 * KIB
INSTRUCTIONS_BYTES_MAX: Final = 256 * KIB
PREPARED_BLOB_BYTES_MAX: Final = 4 * MIB

WINDOW_MESSAGES_MAX: Final = 4096

RECORDER_COMMANDS_MAX: Final = 512
RECORDER_BYTES_MAX: Final = 8 * MIB
RECORDER_DELIVERIES_MAX: Final = 256
PARTIAL_FLUSH_BYTES: Final = 8 * KIB
PARTIAL_FLUSH_S: Final = 0.08

TOOL_TEXT_BYTES_MAX: Final = 50 * KIB
TOOL_TEXT_LINES_MAX: Final = 2000
TOOL_RESULT_BYTES_MAX: Final = 16 * MIB
TOOL_STRUCTURED_BYTES_MAX: Final = 256 * KIB
TOOL_PROGRESS_BYTES_MAX: Final = 1 * MIB
ANSWER_PARTS_BYTES_MAX: Final = 16 * MIB

ANSWER_IN_RESULT_BYTES_MAX: Final = 16 * KIB
ERROR_CHARS_MAX: Final = 300
PREVIEW_CHARS_MAX: Final = 80

CALLS_PER_STEP_MAX: Final = 128
# What a counter's column holds in every database; the exact number stands in the answer's event.
TOKENS_COUNTED_MAX: Final = 2**31 - 1
# How often a model is asked again for an answer that fits the output type.
OUTPUT_REPAIRS_MAX: Final = 2
OUTPUT_PROBLEM_CHARS_MAX: Final = 1000
MODEL_STEPS_DEFAULT: Final = 64
MODEL_STEPS_MAX: Final = 1000
TOOLS_PER_TURN_MAX: Final = 512

CONTINUE_AS_NEW_EVENTS: Final = 4000
CONTINUE_AS_NEW_BYTES: Final = 8 * MIB

TEMPORAL_PAYLOAD_BYTES_MAX: Final = 2 * MIB
TEMPORAL_MESSAGE_BYTES_MAX: Final = 4 * MIB
TEMPORAL_WORKFLOW_ID_CHARS_MAX: Final = 1000

# A workflow id holds "turn/", three ids and two slashes.
assert 3 * ID_CHARS_MAX + 7 <= TEMPORAL_WORKFLOW_ID_CHARS_MAX
# The first activity carries the message once more, beside its identities.
assert MESSAGE_BYTES_MAX + 64 * KIB < TEMPORAL_PAYLOAD_BYTES_MAX
# A structured answer travels as text and as JSON.
assert 2 * ANSWER_IN_RESULT_BYTES_MAX + 64 * KIB < TEMPORAL_PAYLOAD_BYTES_MAX
# A step's reply names every call with a preview and a name of up to 64 characters; a character of a
# preview may take six bytes when escaped.
assert CALLS_PER_STEP_MAX * (6 * PREVIEW_CHARS_MAX + 512) < TEMPORAL_PAYLOAD_BYTES_MAX
# One step's commands travel in one message to the server.
assert CALLS_PER_STEP_MAX * (12 * PREVIEW_CHARS_MAX + 2048) < TEMPORAL_MESSAGE_BYTES_MAX
assert CONTINUE_AS_NEW_EVENTS < 50 * 1024
assert CONTINUE_AS_NEW_BYTES < 50 * MIB
assert PARTIAL_FLUSH_BYTES < RECORDER_BYTES_MAX
assert TOOL_TEXT_BYTES_MAX < TOOL_RESULT_BYTES_MAX
assert RECORDER_DELIVERIES_MAX < RECORDER_COMMANDS_MAX
assert MODEL_STEPS_DEFAULT <= MODEL_STEPS_MAX
