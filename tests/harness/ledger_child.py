"""A process of its own that uses a ledger: opens files at the same time as others, appends, dies.

`python ledger_child.py MODE URL ...`; it says `ready` and then obeys one line of input at a time.
"""

import os
import sys

from harness.ledger_driver import TurnDriver
from perdure.contracts.errors import PerdureError
from perdure.contracts.failpoints import install
from perdure.stores import open_store
from perdure.stores.checkpoints import load_checkpoint, swap_checkpoint

CRASH_EXIT_CODE = 87
NOBODY = 65534


def open_each() -> None:
    """Open every URL that is given, and answer with the ledger's identity."""
    for line in sys.stdin:
        opened = open_store(line.strip())
        print(opened.store_id, flush=True)
        opened.close()


def write(url: str, name: str, count: str) -> None:
    """Write turns into one conversation and count in one checkpoint, as fast as it goes."""
    opened = open_store(url)
    sys.stdin.readline()
    for number in range(int(count)):
        TurnDriver(opened, f"{name}-{number}", conversation="shared").end()
        opened.transact(increment)
    opened.close()
    print("done", flush=True)


def increment(tx: object) -> None:
    """Read a counter and write it one higher."""
    stored = load_checkpoint(tx, "counter")
    payload = {"count": stored.payload["count"] + 1}
    swap_checkpoint(tx, stored.next(payload), stored.revision)


def crash(url: str, place: str) -> None:
    """Commit a turn and die at `place` before anybody hears of it."""
    install({f"commit_answer.{place}": lambda: os._exit(CRASH_EXIT_CODE)})
    turn = TurnDriver(open_store(url), message="persist before acknowledgement")
    turn.prepare()
    turn.answer(1, "committed before exit")


def open_without_rights(url: str) -> None:
    """Open as somebody who may not write the file, write, and name the errors."""
    # What is imported only when a ledger is opened must be there before the rights are gone.
    open_store("sqlite://").close()
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        TurnDriver(open_store(url)).end()
        print("written", flush=True)
    except PerdureError as error:
        print(error.code, flush=True)


MODES = {
    "open": open_each,
    "write": write,
    "crash": crash,
    "open_without_rights": open_without_rights,
}

if __name__ == "__main__":
    print("ready", flush=True)
    MODES[sys.argv[1]](*sys.argv[2:])
