"""A command is written whole or not at all, and a lost acknowledgement is asked for again.

Every command that writes is failed before its transaction, inside it and after its COMMIT.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from harness.ledger_driver import (
    LOST_AT_ONCE_MS,
    RECONCILED,
    SAFE,
    UNSAFE,
    TurnDriver,
    contents,
    owner,
    unchanged,
)

from perdure.contracts.errors import StoreUnavailable
from perdure.contracts.events import Observation
from perdure.contracts.failpoints import InjectedFault, install
from perdure.contracts.messages import user_message
from perdure.contracts.tools import ResultReason
from perdure.stores import Store
from perdure.stores.checkpoints import Checkpoint, swap_checkpoint
from perdure.stores.commands import Eviction, FailAttempt
from perdure.stores.ledger import (
    commit_answer,
    end_turn,
    fail_model_attempt,
    record_superseded,
)
from perdure.stores.operations import (
    close_call,
    dispatch_call,
    report_reconcile,
    settle_call,
    stop_attempt,
)
from perdure.stores.partials import TEXT, append_step_segments, append_tool_output
from perdure.stores.transcript import (
    ConversationAppend,
    DurableCommit,
    append_messages,
    commit_durable_turn,
    ensure_conversation,
)
from perdure.stores.turns import prepare_step


@dataclass(frozen=True)
class Given:
    """A command and its arguments, ready to be run."""

    command: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self, store: Store) -> Any:
        """Give it to the store."""
        return store.transact(self.command, *self.arguments)


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    install({})


def _opening(store: Store) -> Given:
    return Given(prepare_step, (TurnDriver(store).prepare_command(),))


def _next_attempt(store: Store) -> Given:
    turn = TurnDriver(store)
    turn.prepare()
    store.transact(append_step_segments, turn.turn_id, 1, 1, 1, [(TEXT, "half")])
    return Given(prepare_step, (turn.prepare_command(),))


def _take_over(store: Store) -> Given:
    TurnDriver(store).prepare()
    new = TurnDriver(store, acting=owner("second"))
    return Given(prepare_step, (new.prepare_command(opening=new.opening(take_over=1)),))


def _eviction(store: Store) -> Given:
    dead = TurnDriver(store).calling(("send", UNSAFE))
    heir = TurnDriver(store, "request-2", acting=owner("second"))
    eviction = Eviction(turn_id=dead.turn_id, epoch=1)
    return Given(prepare_step, (heir.prepare_command(eviction=eviction),))


def _answer_with_calls(store: Store) -> Given:
    turn = TurnDriver(store)
    turn.prepare()
    return Given(commit_answer, (turn.answer_command(1, "", [("look", SAFE), ("send", UNSAFE)]),))


def _final_answer(store: Store) -> Given:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.run_call(SAFE)
    turn.prepare(2)
    return Given(commit_answer, (turn.answer_command(2),))


def _superseded(store: Store) -> Given:
    turn = TurnDriver(store)
    turn.prepare()
    old = turn.answer_command()
    turn.prepare()
    return Given(record_superseded, (old,))


def _model_error(store: Store) -> Given:
    turn = TurnDriver(store)
    turn.prepare()
    failed = FailAttempt(turn=turn.ref, step=1, attempt=1, error_code="model_unavailable")
    return Given(fail_model_attempt, (failed,))


def _cancel(store: Store) -> Given:
    turn = TurnDriver(store).calling(("look", SAFE), ("send", UNSAFE))
    turn.dispatch("token", UNSAFE, index=1)
    return Given(end_turn, (turn.end_command(),))


def _tombstone(store: Store) -> Given:
    return Given(end_turn, (TurnDriver(store).end_command(),))


def _first_dispatch(store: Store) -> Given:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    return Given(dispatch_call, (turn.dispatch_command("token", UNSAFE),))


def _rerun(store: Store) -> Given:
    turn = TurnDriver(store).calling(("look", SAFE))
    turn.dispatch("first", SAFE)
    again = turn.dispatch_command("second", SAFE, holder_lost_ms=LOST_AT_ONCE_MS, rerun_of=1)
    return Given(dispatch_call, (again,))


def _outcome(store: Store) -> Given:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    return Given(settle_call, (turn.settle_command("token"),))


def _late_outcome(store: Store) -> Given:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    turn.end()
    return Given(settle_call, (turn.settle_command("token"),))


def _interruption(store: Store) -> Given:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    command = turn.close_command(
        ResultReason.WORKER_LOST, generation=1, holder_lost_ms=LOST_AT_ONCE_MS
    )
    return Given(close_call, (command,))


def _report(observation: Observation) -> Callable[[Store], Given]:
    def given(store: Store) -> Given:
        turn = TurnDriver(store).calling(("ship", RECONCILED))
        turn.dispatch("token", RECONCILED)
        return Given(report_reconcile, (turn.reconcile_command(observation),))

    return given


def _stop(store: Store) -> Given:
    TurnDriver(store).calling(("look", SAFE)).dispatch("token", SAFE)
    return Given(stop_attempt, ("token", "error"))


def _segments(store: Store) -> Given:
    turn = TurnDriver(store)
    turn.prepare()
    return Given(append_step_segments, (turn.turn_id, 1, 1, 1, [(TEXT, "half")]))


def _progress(store: Store) -> Given:
    turn = TurnDriver(store).calling(("send", UNSAFE))
    turn.dispatch("token", UNSAFE)
    return Given(append_tool_output, (turn.turn_id, turn.operation_id(), 1, 1, "half"))


def _append(store: Store) -> Given:
    store.transact(ensure_conversation, "default", "talk")
    append = ConversationAppend(
        namespace="default",
        conversation_id="talk",
        expected_version=0,
        messages=(user_message("hello"),),
    )
    return Given(append_messages, (append,))


def _durable_commit(store: Store) -> Given:
    append = _append(store).arguments[0]
    initial = Checkpoint(checkpoint_id="one", kind="test", schema_version=1)
    store.transact(swap_checkpoint, initial, None)
    commit = DurableCommit(append=append, checkpoint=initial.next({}), expected_revision=0)
    return Given(commit_durable_turn, (commit,))


EVERY_COMMAND = pytest.mark.parametrize(
    "given",
    [
        pytest.param(_opening, id="opening"),
        pytest.param(_next_attempt, id="next attempt"),
        pytest.param(_take_over, id="take-over"),
        pytest.param(_eviction, id="eviction"),
        pytest.param(_answer_with_calls, id="answer with calls"),
        pytest.param(_final_answer, id="final answer"),
        pytest.param(_superseded, id="superseded"),
        pytest.param(_model_error, id="model error"),
        pytest.param(_cancel, id="cancel"),
        pytest.param(_tombstone, id="tombstone"),
        pytest.param(_first_dispatch, id="T1"),
        pytest.param(_rerun, id="rerun"),
        pytest.param(_outcome, id="T2"),
        pytest.param(_late_outcome, id="late T2"),
        pytest.param(_interruption, id="interruption"),
        pytest.param(_report(Observation.NOT_EXECUTED), id="reconciled: not executed"),
        pytest.param(_report(Observation.UNKNOWN), id="reconciled: unknown"),
        pytest.param(_stop, id="stop"),
        pytest.param(_segments, id="segments"),
        pytest.param(_progress, id="progress"),
        pytest.param(_append, id="append"),
        pytest.param(_durable_commit, id="durable commit"),
    ],
)


def _fail_at(point: str) -> list[str]:
    reached: list[str] = []

    def lose_the_connection() -> None:
        reached.append(point)
        raise InjectedFault(point)

    install({point: lose_the_connection})
    return reached


@EVERY_COMMAND
def test_a_command_that_fails_inside_writes_nothing_and_can_be_given_again(
    store: Store, given: Callable[[Store], Given]
) -> None:
    command = given(store)
    before = contents(store)
    reached = _fail_at(f"{command.command.__name__}.inside")

    with pytest.raises(StoreUnavailable, match="connection was lost"):
        command.run(store)

    assert len(reached) == 1
    assert contents(store) == before
    install({})
    command.run(store)
    assert contents(store) != before


def test_a_connection_that_is_lost_before_the_transaction_is_a_store_that_is_away(
    file_store: Store,
) -> None:
    command = _opening(file_store)
    _fail_at("prepare_step.before")

    with unchanged(file_store), pytest.raises(StoreUnavailable):
        command.run(file_store)


@EVERY_COMMAND
def test_a_lost_acknowledgement_is_answered_by_the_same_command_without_a_change(
    store: Store, given: Callable[[Store], Given]
) -> None:
    command = given(store)
    before = contents(store)
    reached = _fail_at(f"{command.command.__name__}.committed")
    with pytest.raises(StoreUnavailable) as caught:
        command.run(store)
    install({})
    assert len(reached) == 1
    assert caught.value.retryable
    assert contents(store) != before

    with unchanged(store):
        first = command.run(store)
        second = command.run(store)

    assert first == second


class OwnError(Exception):
    """Something that is no error of a database."""


@pytest.mark.parametrize("given", [_opening, _eviction, _final_answer, _cancel])
def test_whatever_is_raised_inside_rolls_everything_back(
    file_store: Store, given: Callable[[Store], Given]
) -> None:
    command = given(file_store)

    def raise_it() -> None:
        raise OwnError

    install({f"{command.command.__name__}.inside": raise_it})

    with unchanged(file_store), pytest.raises(OwnError):
        command.run(file_store)
