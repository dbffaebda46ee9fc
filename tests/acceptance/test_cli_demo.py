"""`perdure demo` as a program: every promise holds, and it leaves nothing running."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_every_promise_holds(tmp_path: Path) -> None:
    with _demo(tmp_path) as demo:
        output, _ = demo.communicate(timeout=170)

    assert demo.returncode == 0, output
    assert output.count("✓") == 34
    assert "✗" not in output
    assert "Every promise held" in output
    assert _processes_in(tmp_path) == []


def test_a_stopped_demo_leaves_nothing_running(tmp_path: Path) -> None:
    with _demo(tmp_path) as demo:
        assert demo.stdout is not None
        assert "real Temporal server" in demo.stdout.readline()

        demo.send_signal(signal.SIGTERM)
        output, _ = demo.communicate(timeout=60)

    assert demo.returncode == 130, output
    assert _processes_in(tmp_path) == []


def _demo(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "perdure.cli.main", "demo", "--folder", str(folder / "demo")],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _processes_in(folder: Path) -> list[str]:
    # Each child has the folder in its arguments or in its environment.
    found: list[str] = []
    for process in Path("/proc").glob("*"):
        if process.name.isdigit() and int(process.name) != os.getpid():
            found += [
                process.name for name in ("cmdline", "environ") if folder in _paths(process, name)
            ]
    return found


def _paths(process: Path, name: str) -> set[Path]:
    try:
        text = (process / name).read_bytes().decode(errors="replace")
    except OSError:
        # It has ended in the meantime, or is somebody else's.
        return set()
    words = [word.rpartition("=")[2] for word in text.split("\0")]
    return {parent for word in words if word.startswith("/") for parent in Path(word).parents}
