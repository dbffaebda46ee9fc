"""Text that no database holds never keeps a fact from being stored (promise P12).

NUL and lone surrogates can come from models, tools, errors and messages; each way in is tried.
"""

from collections.abc import Callable
from typing import Any

import pytest
from harness.ledger_driver import (
    COST,
    LOST_AT_ONCE_MS,
    SAFE,
    UNSAFE,
    TurnDriver,
    contents,
    done,
    unchanged,
)

from perdure.contracts.messages import (
    Message,
    Role,
    TextPart,
    ThinkingPart,
    assistant_message,
    user_message,
)
from perdure.contracts.model import Usage
from perdure.contracts.tools import ResultReason
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store
from perdure.stores.checkpoints import Checkpoint, load_checkpoint, swap_checkpoint
from perdure.stores.commands import FailAttempt, PlannedCall
from perdure.stores.ledger import commit_answer, fail_model_attempt, load_context
from perdure.stores.operations import settle_call
from perdure.stores.partials import TEXT, THINKING, append_step_segments, append_tool_output
from perdure.stores.queries import Reader
from perdure.stores.transcript import (
    ConversationAppend,
    append_messages,
    ensure_conversation,
    list_transcript,
)

BAD = "a\x00b\ud800c\udfffd"
CLEAN = "a\u2400b\ufffdc\ufffdd"


def _message(store: Store) -> None:
    turn = TurnDriver(store, message=BAD)
    turn.prepare()
    turn.answer()


def _instructions_and_tools(store: Store) -> None:
    turn = TurnDriver(store)
    state = turn.prepare(instructions=BAD, tools_json=f'["{BAD}"]', model=BAD)
    assert state.prepared is not None
    context = store.read(load_context, turn.turn_id, state.prepared)
    assert context.instructions == CLEAN


def _answer(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    turn.answer(1, BAD)
    view = Reader(store).turn(turn.turn_id)
    assert view is not None
    assert view.answer == CLEAN


def _thinking(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    command = turn.answer_command()
    part = ThinkingPart(text=BAD, provider_data={BAD: [BAD]})
    answered = command.answered.model_copy(update={"parts": (part,), "model": BAD})
    store.transact(commit_answer, command.model_copy(update={"answered": answered}))


def _arguments(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    called = turn.called(1, 0, "look", SAFE, arguments={BAD: BAD}, provider_call_id=BAD)
    turn.answer(1, "", [PlannedCall(called=called)])
    reply = turn.dispatch("token", SAFE)
    assert reply.called is not None
    assert reply.called.arguments == {CLEAN: CLEAN}


def _refusal(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    called = turn.called(1, 0, "nothing", UNSAFE)
    turn.answer(1, "", [PlannedCall(called=called, refusal=done(BAD, full=BAD))])


def _result(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.dispatch("token", SAFE)
    command = turn.settle_command("token", done(BAD, full=BAD))
    store.transact(settle_call, command)
    with unchanged(store):
        store.transact(settle_call, command)
    details = Reader(store).details(turn.turn_id)
    assert details is not None
    [operation] = details.operations
    assert operation.text == CLEAN
    assert operation.full_digest is not None
    assert Reader(store).blob(operation.full_digest) == CLEAN


def _late_result(store: Store) -> None:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    turn.end()
    command = turn.settle_command("token", done(BAD, full=BAD))
    store.transact(settle_call, command)
    with unchanged(store):
        store.transact(settle_call, command)


def _progress(store: Store) -> None:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    store.transact(append_tool_output, turn.turn_id, turn.operation_id(), 1, 1, BAD)
    turn.close(ResultReason.WORKER_LOST, generation=1, holder_lost_ms=LOST_AT_ONCE_MS)


def _stream(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    pieces = [(TEXT, BAD), (THINKING, BAD)]
    store.transact(append_step_segments, turn.turn_id, 1, 1, 1, pieces)
    turn.prepare()


def _error_code(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    failed = FailAttempt(turn=turn.ref, step=1, attempt=1, error_code=BAD)
    store.transact(fail_model_attempt, failed)


def _detail(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    turn.end(TurnStatus.FAILED, "model_failed", detail=BAD)
    view = Reader(store).turn(turn.turn_id)
    assert view is not None
    assert view.detail == CLEAN


def _worker(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare(worker=BAD)
    turn.answer(1, "", [("look", SAFE)])
    turn.dispatch("token", SAFE, worker=BAD)


def _append(store: Store) -> None:
    store.transact(ensure_conversation, "default", "talk")
    messages = (user_message(BAD), assistant_message(BAD))
    append = ConversationAppend(
        namespace="default", conversation_id="talk", expected_version=0, messages=messages
    )
    store.transact(append_messages, append)
    [first, _] = store.read(list_transcript, "default", "talk")
    assert first.message.text == CLEAN


def _checkpoint(store: Store) -> None:
    checkpoint = Checkpoint(
        checkpoint_id="one", kind="test", schema_version=1, payload={BAD: [BAD]}
    )
    store.transact(swap_checkpoint, checkpoint, None)
    assert store.read(load_checkpoint, "one").payload == {CLEAN: [CLEAN]}


@pytest.mark.parametrize(
    "write",
    [
        _message,
        _instructions_and_tools,
        _answer,
        _thinking,
        _arguments,
        _refusal,
        _result,
        _late_result,
        _progress,
        _stream,
        _error_code,
        _detail,
        _worker,
        _append,
        _checkpoint,
    ],
)
def test_whatever_text_comes_in_is_stored_without_what_no_database_holds(
    store: Store, write: Callable[[Store], Any]
) -> None:
    write(store)

    text = [
        value
        for rows in contents(store).values()
        for row in rows
        for value in row
        if isinstance(value, str)
    ]
    assert any("a\u2400b" in value or "a\\u2400b" in value for value in text)
    for value in text:
        assert "\x00" not in value
        assert "\\u0000" not in value
        value.encode()


def test_integers_of_any_size_are_kept_exactly(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    called = turn.called(1, 0, "look", SAFE, arguments={"number": 2**80})
    turn.answer(1, "", [PlannedCall(called=called)])

    reply = turn.dispatch("token", SAFE)

    assert reply.called is not None
    assert reply.called.arguments == {"number": 2**80}


def test_a_cost_beyond_every_counter_does_not_keep_an_answer_from_being_stored(
    store: Store,
) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    absurd = Usage(input_tokens=2**70, output_tokens=COST.output_tokens)

    state = store.transact(commit_answer, turn.answer_command(usage=absurd))

    assert state.result is not None
    assert state.result.answer == "the answer"
    assert state.result.usage.output_tokens == COST.output_tokens


def test_an_empty_text_part_is_no_message_of_its_own(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    command = turn.answer_command(1, "")
    blank = command.answered.model_copy(update={"parts": (TextPart(text=""),)})
    store.transact(commit_answer, command.model_copy(update={"answered": blank}))

    assert turn.transcript()[-1] == Message(role=Role.ASSISTANT, parts=(TextPart(text=""),))
