"""Failpoints: free where nothing is set, announced where they are reached."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.contracts.failpoints import InjectedFault, failpoint, install

PROGRAM = """
from perdure.contracts.failpoints import failpoint
for _ in range(3):
    failpoint("t1.committed")
    print("passed", flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """No test leaves an action behind."""
    yield
    install({})


def start(setting: str, folder: Path) -> subprocess.Popen[str]:
    """A process that visits one point three times, with that setting."""
    environment = {"PERDURE_FAILPOINTS": setting, "PERDURE_FAILPOINT_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_point_does_nothing_where_nothing_is_set() -> None:
    failpoint("t1.committed")


def test_an_installed_action_runs_at_its_point_only() -> None:
    visits: list[str] = []
    install({"t1.begin": lambda: visits.append("t1.begin")})

    for name in ("t1.begin", "t2.begin", "t1.begin"):
        failpoint(name)

    assert visits == ["t1.begin", "t1.begin"]


def test_an_action_may_fail_like_a_driver() -> None:
    def fail() -> None:
        raise InjectedFault("lost")

    install({"t1.committed": fail})

    with pytest.raises(InjectedFault):
        failpoint("t1.committed")


def test_actions_can_be_removed() -> None:
    install({"t1.begin": pytest.fail})
    install({})

    failpoint("t1.begin")


def test_a_held_process_announces_itself_and_goes_on_when_it_is_let_go(tmp_path: Path) -> None:
    process = start("other=hold;t1.committed=hold@2", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "passed\n"

    while not (reached := list(tmp_path.glob("*.reached"))):
        assert process.poll() is None
    reached[0].with_suffix(".go").touch()
    output, errors = process.communicate(timeout=30)

    assert reached[0].name == f"t1.committed.{process.pid}.reached"
    assert (output, errors, process.returncode) == ("passed\npassed\n", "", 0)


def test_an_error_is_raised_once_at_the_visit_that_was_named(tmp_path: Path) -> None:
    output, errors = start("t1.committed=error@3", tmp_path).communicate(timeout=30)

    assert output == "passed\npassed\n"
    assert "InjectedFault: t1.committed" in errors
    assert len(list(tmp_path.glob("t1.committed.*.reached"))) == 1


def test_an_unknown_action_stops_the_process_at_its_start(tmp_path: Path) -> None:
    output, errors = start("t1.committed=explode", tmp_path).communicate(timeout=30)

    assert output == ""
    assert "the action is hold or error" in errors
