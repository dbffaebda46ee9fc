"""Ending a turn without an answer: every call closed, a marker for the next turn, one terminal."""

import contextlib
from collections.abc import Callable

import pytest
from harness.ledger_driver import (
    KEYED,
    LOST_AT_ONCE_MS,
    SAFE,
    UNSAFE,
    TurnDriver,
    damage,
    done,
    owner,
    rows,
    unchanged,
)
from sqlalchemy import Connection

from perdure.contracts.errors import LedgerRejection
from perdure.contracts.messages import Message, MessageKind, Role
from perdure.contracts.tools import ResultReason, ResultStatus, ToolOutcome
from perdure.contracts.turn import TurnResult, TurnStatus
from perdure.stores import Store
from perdure.stores.checkpoints import load_checkpoint
from perdure.stores.commands import PlannedCall, PrepareKind
from perdure.stores.event_log import Appender
from perdure.stores.ledger import (
    commit_answer,
    end_turn,
    latest_owner,
    load_context,
    read_result,
)
from perdure.stores.partials import append_tool_output
from perdure.stores.queries import Reader
from perdure.stores.rows import lock_conversation
from perdure.stores.transcript import read_conversation

ENDS = [(TurnStatus.CANCELLED, "cancelled"), (TurnStatus.FAILED, "model_failed")]


@pytest.mark.parametrize(("status", "reason"), ENDS)
def test_the_end_frees_the_conversation_and_is_recorded_everywhere(
    store: Store, status: TurnStatus, reason: str
) -> None:
    turn = TurnDriver(store)
    turn.prepare()

    result = turn.end(status, reason, detail="why it was")

    assert result is not None
    assert (result.status, result.stop_reason, result.answer) == (status, reason, None)
    assert result.conversation_version == 1
    assert turn.kinds()[-1] == "turn_ended"
    assert store.read(read_conversation, "default", "talk").active_turn_id is None
    assert store.read(load_checkpoint, turn.turn_id).payload["phase"] == status.value
    assert store.read(read_result, turn.turn_id) == result
    view = Reader(store).turn(turn.turn_id)
    assert view is not None
    assert (view.status, view.detail) == (status, "why it was")
    assert store.read(latest_owner, turn.ref) is None


@pytest.mark.parametrize(("status", "reason"), ENDS)
def test_an_exact_retry_of_the_end_changes_nothing(
    store: Store, status: TurnStatus, reason: str
) -> None:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    command = turn.end_command(status, reason)
    first = store.transact(end_turn, command)

    with unchanged(store):
        assert store.transact(end_turn, command) == first


def test_whoever_ends_second_gets_the_first_outcome(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    first = turn.end(TurnStatus.CANCELLED, "cancelled")

    with unchanged(store):
        assert turn.end(TurnStatus.FAILED, "model_failed") == first


def test_an_end_that_comes_after_the_final_commit_gets_its_answer(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    answered = turn.answer().result

    with unchanged(store):
        assert turn.end() == answered

    assert turn.kinds().count("turn_ended") == 1


def test_a_final_commit_that_comes_after_the_end_gets_that_outcome(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    command = turn.answer_command()
    ended = turn.end()

    state = store.transact(commit_answer, command)

    assert (state.kind, state.result) == (PrepareKind.OVER, ended)
    assert turn.kinds().count("turn_ended") == 1
    assert "model_answered" not in turn.kinds()


def test_every_open_call_gets_its_one_result_by_what_became_of_it(store: Store) -> None:
    refusal = ToolOutcome(
        status=ResultStatus.REFUSED, reason=ResultReason.UNKNOWN_TOOL, text="no such tool"
    )
    turn = TurnDriver(store)
    turn.prepare()
    refused = PlannedCall(called=turn.called(1, 3, "nothing", UNSAFE), refusal=refusal)
    turn.answer(1, "", [("ran", SAFE), ("lost", UNSAFE), ("waits", KEYED), refused])
    turn.run_call(SAFE, "seen")
    turn.dispatch("token", UNSAFE, index=1)
    store.transact(
        append_tool_output, turn.turn_id, turn.operation_id(1), 1, 1, "committed progress"
    )

    turn.end()

    settled = {event.tool: event for event in turn.events() if event.kind == "tool_settled"}
    assert {tool: event.status.value for tool, event in settled.items()} == {
        "ran": "ok",
        "lost": "interrupted",
        "waits": "not_executed",
        "nothing": "refused",
    }
    assert settled["lost"].text.endswith("committed progress")
    assert settled["lost"].reason is ResultReason.TURN_CANCELLED
    assert rows(store, "select count(*) from partial_segments") == [(0,)]


def test_a_cancelled_turn_leaves_calls_results_in_call_order_and_a_marker(store: Store) -> None:
    turn = TurnDriver(store).calling(("a", UNSAFE), ("b", SAFE), ("c", SAFE))
    turn.run_call(SAFE, "from c", index=2)
    turn.dispatch("token", UNSAFE)

    turn.end()

    question, calling, results, marker = turn.transcript()
    assert (question.role, calling.role) == (Role.USER, Role.ASSISTANT)
    assert [part.call_id for part in calling.calls] == [turn.operation_id(i) for i in range(3)]
    assert [part.call_id for part in results.results] == [part.call_id for part in calling.calls]
    assert (marker.role, marker.kind) == (Role.USER, MessageKind.MARKER)
    said = marker.text
    assert "Call c: took effect" in said
    assert "Call a: was interrupted and may or may not have taken effect" in said
    assert "Call b: was not executed" in said


def _is_well_formed(messages: list[Message]) -> bool:
    """No orphan call and no orphan result, results right behind their calls and in their order."""
    expected: list[str] = []
    for message in messages:
        results = [part.call_id for part in message.results]
        if results != expected:
            return False
        expected = [part.call_id for part in message.calls]
    return not expected


@pytest.mark.parametrize(("status", "reason"), ENDS)
@pytest.mark.parametrize("settled", range(3))
def test_the_next_turn_is_sent_no_orphan_whatever_was_open(
    store: Store, status: TurnStatus, reason: str, settled: int
) -> None:
    turn = TurnDriver(store).calling(("a", SAFE), ("b", UNSAFE))
    for index in range(settled):
        turn.run_call((SAFE, UNSAFE)[index], index=index)
    turn.end(status, reason)
    following = TurnDriver(store, "request-2", message="and now?")
    state = following.prepare()
    assert state.prepared is not None

    context = store.read(load_context, following.turn_id, state.prepared)

    assert _is_well_formed(list(context.messages))
    assert context.messages[-2].kind is MessageKind.MARKER
    assert context.messages[-1].text == "and now?"


def test_steps_that_were_committed_stay_in_the_transcript_of_a_failed_turn(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.run_call(SAFE, "seen")
    turn.prepare(2)

    turn.end(TurnStatus.FAILED, "model_failed")

    roles = [message.role for message in turn.transcript()]
    assert roles == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.USER]


def test_the_version_counts_ends_and_the_sequence_counts_messages(store: Store) -> None:
    first = TurnDriver(store)
    first.prepare()
    first.answer()
    second = TurnDriver(store, "request-2")
    second.prepare()
    result = second.end()

    state = store.read(read_conversation, "default", "talk")

    assert result is not None
    assert (state.version, state.last_sequence) == (2, 4)
    assert result.conversation_version == 2


def _dispatch(turn: TurnDriver) -> object:
    return turn.dispatch("token", SAFE, index=1)


def _prepare(turn: TurnDriver) -> object:
    return turn.prepare(2)


def _answer(turn: TurnDriver) -> object:
    return turn.answer(2)


def _end(turn: TurnDriver) -> object:
    return turn.end(TurnStatus.FAILED, "again")


@pytest.mark.parametrize("act", [_dispatch, _prepare, _answer, _end])
def test_nothing_is_appended_to_a_sealed_turn_even_where_its_row_says_open(
    store: Store, act: Callable[[TurnDriver], object]
) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.run_call(SAFE)
    turn.prepare(2)
    turn.answer(2, "", [("look", SAFE), ("look", SAFE)])
    turn.end()
    damage(store, "update turns set status = 'open'")
    kinds = turn.kinds()

    with contextlib.suppress(LedgerRejection):
        act(turn)

    assert turn.kinds() == kinds


def test_a_sealed_turn_takes_the_same_event_again_and_no_other(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    turn.answer()
    last = turn.events()[-1]
    assert last.kind == "turn_ended"

    def append(detail: str) -> int:
        def command(tx: Connection) -> int:
            conversation = lock_conversation(tx, turn.ref)
            assert conversation is not None
            return Appender(tx, conversation, turn.turn_id).append(
                last.model_copy(update={"detail": detail})
            )

        return store.transact(command)

    with unchanged(store):
        assert append(last.detail) == len(turn.kinds())
        with pytest.raises(LedgerRejection, match="turn_sealed"):
            append("other")


def test_a_turn_has_one_terminal_event_whoever_races_for_it(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    answer, cancel = turn.answer_command(), turn.end_command()
    fail = turn.end_command(TurnStatus.FAILED, "model_failed")

    outcomes: list[TurnResult | None] = [
        store.transact(end_turn, cancel),
        store.transact(commit_answer, answer).result,
        store.transact(end_turn, fail),
    ]

    assert outcomes[0] is not None
    assert outcomes == [outcomes[0]] * 3
    assert turn.kinds().count("turn_ended") == 1


def test_the_newer_owner_ends_the_turn_of_the_older(store: Store) -> None:
    TurnDriver(store).calling(("send", UNSAFE))
    new = TurnDriver(store, acting=owner("second"))
    new.prepare(opening=new.opening(take_over=1))

    result = new.end(TurnStatus.FAILED, "model_failed")

    assert result is not None
    assert result.status is TurnStatus.FAILED


def test_the_end_knows_what_an_interrupted_generation_had_done(store: Store) -> None:
    """A rerun that has not said anything yet does not hide what the first run said."""
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.dispatch("first", SAFE)
    store.transact(append_tool_output, turn.turn_id, turn.operation_id(), 1, 1, "first words")
    turn.dispatch("second", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)

    turn.end()

    [settled] = [event for event in turn.events() if event.kind == "tool_settled"]
    assert settled.text.endswith("first words")


def test_a_turn_that_ends_at_its_second_step_reports_the_cost_of_both(store: Store) -> None:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.dispatch("token", SAFE)
    turn.settle("token", done())
    turn.prepare(2)

    result = turn.end()

    assert result is not None
    assert result.usage.input_tokens == 5
