"""Committing a model's answer: once, by the newest attempt, and with the turn where it is the last.

Streamed text is kept beside the ledger and belongs to one attempt.
"""

import pytest
from harness.ledger_driver import COST, SAFE, UNSAFE, TurnDriver, owner, rows, unchanged

from perdure.contracts.errors import Superseded
from perdure.contracts.messages import Role, TextPart, ToolCallPart, ToolResultPart
from perdure.contracts.model import Usage
from perdure.contracts.tools import ResultReason, ResultStatus, ToolOutcome
from perdure.contracts.turn import TurnStatus
from perdure.stores import Store
from perdure.stores.checkpoints import load_checkpoint
from perdure.stores.commands import FailAttempt, PlannedCall, PrepareKind
from perdure.stores.ledger import commit_answer, fail_model_attempt, record_superseded
from perdure.stores.partials import (
    OUTPUT,
    TEXT,
    THINKING,
    append_step_segments,
    append_tool_output,
    read_partial,
    read_segments,
)
from perdure.stores.queries import Reader
from perdure.stores.transcript import read_conversation


def _stream(turn: TurnDriver, *texts: str, attempt: int = 1, position: int = 1) -> int:
    pieces = [(TEXT, text) for text in texts]
    return turn.store.transact(append_step_segments, turn.turn_id, 1, attempt, position, pieces)


def test_the_last_answer_commits_transcript_checkpoint_and_terminal_event(store: Store) -> None:
    turn = TurnDriver(store, message="hello")
    turn.prepare()

    state = turn.answer(1, "good day")

    assert state.kind is PrepareKind.OVER
    assert state.result is not None
    assert (state.result.status, state.result.stop_reason) == (TurnStatus.COMPLETED, "answered")
    assert (state.result.answer, state.result.conversation_version) == ("good day", 1)
    assert state.result.usage == COST
    assert turn.kinds() == ["user_message", "model_prepared", "model_answered", "turn_ended"]
    assert [message.text for message in turn.transcript()] == ["hello", "good day"]
    assert store.read(load_checkpoint, turn.turn_id).payload["phase"] == "completed"
    assert store.read(read_conversation, "default", "talk").active_turn_id is None


def test_an_exact_retry_of_the_final_commit_changes_nothing(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    command = turn.answer_command()
    first = store.transact(commit_answer, command)

    with unchanged(store):
        again = store.transact(commit_answer, command)

    assert again.result == first.result


def test_calls_that_are_refused_are_closed_with_the_answer_and_not_pending(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    refusal = ToolOutcome(
        status=ResultStatus.REFUSED, reason=ResultReason.UNKNOWN_TOOL, text="no such tool"
    )
    refused = PlannedCall(called=turn.called(1, 0, "nothing", UNSAFE), refusal=refusal)

    state = turn.answer(1, "", [refused, ("look", SAFE)])

    assert [call.index for call in state.pending] == [1]
    assert turn.kinds()[-4:] == ["model_answered", "tool_called", "tool_settled", "tool_called"]
    with unchanged(store):
        assert turn.dispatch("token", UNSAFE).kind == "settled"


def test_an_older_attempt_can_neither_stream_nor_answer(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    old = turn.answer_command(1, "old answer")
    turn.prepare()

    with unchanged(store):
        with pytest.raises(Superseded):
            _stream(turn, "late", attempt=1)
        with pytest.raises(Superseded):
            store.transact(commit_answer, old)

    result = turn.answer(1, "new answer").result
    assert result is not None
    assert result.answer == "new answer"


def test_of_an_older_attempt_only_its_cost_is_kept(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    old = turn.answer_command(1, "old answer", usage=Usage(input_tokens=100, output_tokens=50))
    turn.prepare()

    store.transact(record_superseded, old)
    with unchanged(store):
        store.transact(record_superseded, old)

    turn.answer(1, "new answer")
    assert rows(store, "select attempt, status, input_tokens from usage order by attempt") == [
        (1, "superseded", 100),
        (2, "committed", 5),
    ]
    view = Reader(store).turn(turn.turn_id)
    assert view is not None
    assert view.usage.input_tokens == 105


def test_the_cost_of_an_answer_that_came_second_is_kept(store: Store) -> None:
    """Also where the step was answered meanwhile by a newer attempt."""
    turn = TurnDriver(store)
    turn.prepare()
    old = turn.answer_command(1, "", [("send", UNSAFE)], usage=Usage(input_tokens=100))
    turn.prepare()
    new = turn.answer(1, "", [("look", SAFE)])

    state = store.transact(commit_answer, old)

    assert state.pending == new.pending
    assert "send" not in {call.tool for call in state.pending}
    assert rows(store, "select attempt, status, input_tokens from usage order by attempt") == [
        (1, "superseded", 100),
        (2, "committed", 5),
    ]


def test_the_cost_of_an_answer_after_the_end_is_kept(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    late = turn.answer_command()
    ended = turn.end()

    state = store.transact(commit_answer, late)

    assert state.kind is PrepareKind.OVER
    assert state.result == ended
    assert rows(store, "select status, input_tokens from usage") == [("superseded", 5)]
    assert turn.kinds()[-1] == "turn_ended"


def test_the_answer_replaces_what_was_streamed(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    _stream(turn, "the an", "swer")
    assert [view.text for view in Reader(store).partials(turn.turn_id)] == ["the answer"]

    turn.answer(1, "the answer")

    assert Reader(store).partials(turn.turn_id) == []
    assert rows(store, "select count(*) from aborted_partials") == [(0,)]


def test_a_newer_attempt_keeps_the_older_ones_text_as_aborted(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    _stream(turn, "half ", "a sentence")

    turn.prepare()

    assert Reader(store).partials(turn.turn_id) == []
    details = Reader(store).details(turn.turn_id)
    assert details is not None
    [aborted] = details.aborted_partials
    assert (aborted.subject, aborted.attempt, aborted.text, aborted.reason) == (
        "step1",
        1,
        "half a sentence",
        "superseded",
    )


def test_aborted_text_is_never_part_of_a_request_nor_of_the_transcript(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    _stream(turn, "aborted words")
    turn.prepare()
    turn.answer(1, "fresh words")

    said = [message.text for message in turn.transcript()]

    assert said == ["hello", "fresh words"]
    assert "aborted words" not in "".join(
        row[0] for row in rows(store, "select payload from events")
    )


def test_an_attempt_that_streamed_nothing_leaves_no_aborted_row(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    turn.prepare()

    assert rows(store, "select count(*) from aborted_partials") == [(0,)]


def test_a_reported_error_keeps_the_streamed_text_as_aborted(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    _stream(turn, "half")
    failed = FailAttempt(turn=turn.ref, step=1, attempt=1, error_code="model_unavailable")

    store.transact(fail_model_attempt, failed)

    assert rows(store, "select attempt, text, reason from aborted_partials") == [
        (1, "half", "model_error")
    ]


def test_the_end_of_the_turn_keeps_the_streamed_text_and_closes_the_stream(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    after = _stream(turn, "half")

    turn.end()

    assert rows(store, "select text, reason from aborted_partials") == [("half", "cancelled")]
    with unchanged(store), pytest.raises(Superseded):
        _stream(turn, " and more", position=after)


def test_a_piece_given_twice_is_stored_once(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    after = _stream(turn, "one ", "two ")

    with unchanged(store):
        assert _stream(turn, "one ", "two ") == after
    _stream(turn, "three", position=after)

    assert store.read(read_partial, turn.turn_id, "step1") == "one two three"


def test_thinking_is_kept_apart_in_order(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    pieces = [(THINKING, "hm"), (THINKING, "m"), (TEXT, "one"), (THINKING, "!"), (TEXT, " two")]

    after = store.transact(append_step_segments, turn.turn_id, 1, 1, 1, pieces)

    segments = store.read(read_segments, turn.turn_id, "step1")
    assert [(row.channel, row.text) for row in segments] == [
        ("thinking", "hmm"),
        ("text", "one"),
        ("thinking", "!"),
        ("text", " two"),
    ]
    assert after == 5
    [view] = Reader(store).partials(turn.turn_id)
    assert (view.text, view.thinking) == ("one two", "hmm!")


def test_a_step_that_nobody_prepared_takes_no_text(store: Store) -> None:
    turn = TurnDriver(store)

    with pytest.raises(Superseded):
        _stream(turn, "text")


def test_progress_of_a_tool_belongs_to_its_newest_generation(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.dispatch("first", SAFE)
    operation = turn.operation_id()
    store.transact(append_tool_output, turn.turn_id, operation, 1, 1, "first run")
    turn.dispatch("second", SAFE, holder_lost_ms=-1, rerun_of=1)

    with unchanged(store), pytest.raises(Superseded):
        store.transact(append_tool_output, turn.turn_id, operation, 1, 2, " goes on")
    after = store.transact(append_tool_output, turn.turn_id, operation, 2, 1, "second run")
    with unchanged(store):
        again = store.transact(append_tool_output, turn.turn_id, operation, 2, 1, "second run")

    assert (after, again) == (2, 2)
    assert store.read(read_partial, turn.turn_id, operation) == "second run"


def test_progress_after_the_result_is_refused_and_the_rest_is_gone(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.dispatch("token", SAFE)
    operation = turn.operation_id()
    store.transact(append_tool_output, turn.turn_id, operation, 1, 1, "on its way")
    turn.settle("token")

    with unchanged(store), pytest.raises(Superseded):
        store.transact(append_tool_output, turn.turn_id, operation, 1, 2, " late")

    assert rows(store, "select count(*) from partial_segments where channel = :c", c=OUTPUT) == [
        (0,)
    ]


def test_a_request_is_made_of_the_transcript_and_the_turns_own_facts(store: Store) -> None:
    from perdure.stores.ledger import load_context

    earlier = TurnDriver(store, message="first")
    earlier.prepare()
    earlier.answer(1, "one")
    turn = TurnDriver(store, "request-2", message="second").calling(("a", SAFE), ("b", SAFE))
    turn.run_call(SAFE, "result b", index=1)
    turn.run_call(SAFE, "result a", index=0)
    state = turn.prepare(2)
    assert state.prepared is not None

    messages = store.read(load_context, turn.turn_id, state.prepared).messages

    roles = [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT, Role.TOOL]
    assert [message.role for message in messages] == roles
    assert [part.text for part in messages[4].results] == ["result a", "result b"]
    assert [part.call_id for part in messages[3].calls] == [
        turn.operation_id(0),
        turn.operation_id(1),
    ]


def test_an_empty_answer_ends_the_turn_and_leaves_only_the_question(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()

    state = turn.answer(1, "")

    assert state.result is not None
    assert state.result.answer == ""
    assert [message.text for message in turn.transcript()] == ["hello"]


def test_the_transcript_keeps_calls_and_results_in_call_order(store: Store) -> None:
    turn = TurnDriver(store).calling(("a", SAFE), ("b", UNSAFE))
    turn.run_call(UNSAFE, "from b", index=1)
    turn.run_call(SAFE, "from a", index=0)
    turn.prepare(2)
    turn.answer(2, "all done")

    question, calling, results, final = turn.transcript()

    assert question.text == "hello"
    assert all(isinstance(part, ToolCallPart) for part in calling.parts)
    assert [part.name for part in calling.calls] == ["a", "b"]
    assert [(part.name, part.text) for part in results.results] == [
        ("a", "from a"),
        ("b", "from b"),
    ]
    assert all(isinstance(part, ToolResultPart) for part in results.parts)
    assert final.parts == (TextPart(text="all done"),)


def test_usage_counts_every_attempt_of_every_step(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.run_call(SAFE)
    turn.prepare(2)

    result = turn.answer(2).result

    assert result is not None
    assert result.usage == COST + COST


def test_a_take_over_continues_the_step_as_a_newer_attempt(store: Store) -> None:
    old = TurnDriver(store)
    old.prepare()
    _stream(old, "half")
    new = TurnDriver(store, acting=owner("second"))

    state = new.prepare(opening=new.opening(take_over=1))

    assert (state.kind, state.attempt) == (PrepareKind.READY, 2)
    with unchanged(store), pytest.raises(Superseded):
        _stream(old, " more", attempt=1, position=2)
    assert rows(store, "select text from aborted_partials") == [("half",)]
