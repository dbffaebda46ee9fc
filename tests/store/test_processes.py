"""Several processes and threads on one ledger, and what a process leaves behind that dies."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import ledger_child
from harness.ledger_driver import TurnDriver, owner, rows, unchanged
from harness.store_children import Child

from perdure.stores import Store, open_store
from perdure.stores.checkpoints import Checkpoint, load_checkpoint, swap_checkpoint
from perdure.stores.commands import PrepareKind
from perdure.stores.transcript import read_conversation

COUNTER = Checkpoint(checkpoint_id="counter", kind="test", schema_version=1, payload={"count": 0})


@contextmanager
def _children(count: int, *arguments: str) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        children: list[Child] = []
        for number in range(count):
            filled = [argument.format(number=number) for argument in arguments]
            child = Child(*filled)
            stack.callback(child.close)
            children.append(child)
        for child in children:
            assert child.hear() == "ready"
        yield children


@pytest.mark.slow
def test_processes_that_open_a_new_file_at_once_all_get_the_same_ledger(tmp_path: Path) -> None:
    with _children(3, "open") as children:
        for number in range(4):
            for child in children:
                child.say(f"sqlite:///{tmp_path}/new-{number}.db")
            identities = {child.hear() for child in children}

            assert len(identities) == 1
            assert identities != {""}


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing_and_leave_no_gap(
    file_store: Store,
) -> None:
    file_store.transact(swap_checkpoint, COUNTER, None)
    count = 10

    with _children(2, "write", file_store.url, "writer-{number}", str(count)) as children:
        for child in children:
            child.say()
        for number in range(count):
            TurnDriver(file_store, f"parent-{number}", conversation="shared").end()
            file_store.transact(ledger_child.increment)
        assert [child.hear() for child in children] == ["done", "done"]

    ordinals = [row[0] for row in rows(file_store, "select ordinal from events order by ordinal")]
    assert ordinals == list(range(1, 3 * count * 2 + 1))
    assert file_store.read(load_checkpoint, "counter").payload == {"count": 3 * count}


@pytest.mark.parametrize("shared", [True, False])
def test_threads_lose_no_update(file_store: Store, shared: bool) -> None:
    file_store.transact(swap_checkpoint, COUNTER, None)
    stores = [file_store if shared else open_store(file_store.url) for _ in range(4)]

    def count_up(store: Store) -> None:
        for _ in range(10):
            store.transact(ledger_child.increment)

    _at_once([lambda store=store: count_up(store) for store in stores])

    assert file_store.read(load_checkpoint, "counter").payload == {"count": 40}
    for store in stores:
        store.close()


def test_of_threads_that_open_one_turn_at_once_one_owns_it(store: Store) -> None:
    states = []

    def open_turn(name: str) -> None:
        states.append(TurnDriver(store, acting=owner(name)).prepare())

    _at_once([lambda name=name: open_turn(name) for name in "abcd"])

    kinds = sorted(state.kind for state in states)
    assert kinds == [PrepareKind.FOLLOW] * 3 + [PrepareKind.READY]
    assert rows(store, "select count(*) from events") == [(2,)]


def test_of_threads_that_end_and_answer_a_turn_at_once_one_decides(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()
    results = []
    acts = [lambda: results.append(turn.end()), lambda: results.append(turn.answer().result)]

    _at_once(acts)

    assert results[0] == results[1]
    assert turn.kinds().count("turn_ended") == 1


def _at_once(acts: list[Callable[[], object]]) -> None:
    barrier = threading.Barrier(len(acts))
    failures: list[BaseException] = []

    def run(act: Callable[[], object]) -> None:
        barrier.wait()
        try:
            act()
        # Whatever it is, the test's own thread must hear of it.
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _crash(store: Store, place: str) -> None:
    child = Child("crash", store.url, place)
    try:
        assert child.hear() == "ready"
        assert child.exit_code() == ledger_child.CRASH_EXIT_CODE
    finally:
        child.close()


@pytest.mark.slow
def test_a_turn_that_was_committed_before_its_process_died_is_found_whole(
    file_store: Store,
) -> None:
    _crash(file_store, "committed")
    reopened = open_store(file_store.url)

    with unchanged(reopened):
        state = TurnDriver(reopened, message="persist before acknowledgement").prepare()

    assert state.kind is PrepareKind.OVER
    assert state.result is not None
    assert (state.result.conversation_version, state.result.answer) == (1, "committed before exit")
    turn = TurnDriver(reopened)
    assert [message.text for message in turn.transcript()] == [
        "persist before acknowledgement",
        "committed before exit",
    ]
    assert rows(reopened, "select step, attempt, status from usage") == [(1, 1, "committed")]
    reopened.close()


@pytest.mark.slow
def test_a_turn_whose_process_died_inside_the_final_commit_goes_on_as_if_it_had_not_begun(
    file_store: Store,
) -> None:
    _crash(file_store, "inside")
    reopened = open_store(file_store.url)
    turn = TurnDriver(reopened, message="persist before acknowledgement")
    assert turn.kinds() == ["user_message", "model_prepared"]
    assert reopened.read(read_conversation, "default", "talk").version == 0

    state = turn.prepare()
    result = turn.answer(1, "said again").result

    assert (state.kind, state.attempt) == (PrepareKind.READY, 2)
    assert result is not None
    assert result.conversation_version == 1
    reopened.close()
