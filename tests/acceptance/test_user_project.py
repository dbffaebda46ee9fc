"""A project of one's own, made of nothing but the README's text, passes its tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The README's files, in a folder that has nothing else."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, source in FILE.findall(README.read_text("utf-8")):
        (folder / name).write_text(source, "utf-8")
    return folder


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in the folder as its owner does, without this run's own settings."""
    private = ("PERDURE_", "TEMPORAL_", "PYTEST_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(private)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_readme_has_an_agent_and_its_tests(project: Path) -> None:
    assert sorted(path.name for path in project.iterdir()) == [
        "conftest.py",
        "desk.py",
        "test_desk.py",
    ]


def test_the_project_of_the_readme_passes_its_tests(project: Path) -> None:
    done = run_pytest(project)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b2 passed\b", done.stdout)


def test_its_tests_fail_where_the_agent_does_something_else(project: Path) -> None:
    source = (project / "desk.py").read_text("utf-8")
    (project / "desk.py").write_text(source.replace("is paid", "is lost"), "utf-8")

    done = run_pytest(project, "-k", "looked_up")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "The desk says: order 1 is lost" in done.stdout
