"""Child processes and stop signals of a command."""

import asyncio
import os
import signal
import sys

import pytest

from perdure.cli.child_process import ChildProcess
from perdure.cli.stopping import stop_on_signals

pytestmark = pytest.mark.slow

_SLEEPER = "import time; print('ready', flush=True); time.sleep(60)"
_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(60)"
)


async def test_a_child_that_ends_by_itself_gives_its_code_and_its_last_words() -> None:
    child = _child("import sys; print('it is broken', file=sys.stderr); sys.exit(3)")

    assert await child.wait() == 3
    assert child.pid is None
    assert child.last_words() == "it is broken"
    child.kill()


async def test_a_stopped_child_is_gone() -> None:
    child = await _ready(_SLEEPER)
    pid = child.pid
    assert pid is not None

    await child.stop(grace_s=10)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_child_that_will_not_stop_is_killed_after_its_grace() -> None:
    child = await _ready(_STUBBORN)

    await child.stop(grace_s=0.2)

    assert child.pid is None


async def test_a_child_that_was_frozen_can_be_killed() -> None:
    child = await _ready(_SLEEPER)
    child.send(signal.SIGSTOP)

    child.kill()

    assert child.pid is None


async def test_a_child_is_not_in_the_commands_own_process_group() -> None:
    child = await _ready(_SLEEPER)
    pid = child.pid
    assert pid is not None

    group = os.getpgid(pid)
    child.kill()

    assert group != os.getpgrp()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event_and_the_second_one_acts_as_before(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 10)

        assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


def _child(script: str) -> ChildProcess:
    child = ChildProcess([sys.executable, "-c", script])
    child.start()
    return child


async def _ready(script: str) -> ChildProcess:
    child = _child(script)
    async with asyncio.timeout(10):
        while child.last_words() != "ready":
            await asyncio.sleep(0.01)
    return child
