"""The `perdure` program: its errors are one helpful line, its help loads nothing heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perdure.cli import main as program
from perdure.cli.main import cli, main
from perdure.contracts.errors import PortTaken

COMMANDS = ("dev", "worker", "ask", "transcript", "turn", "demo")


def test_the_help_names_every_command() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output

    assert [name for name in COMMANDS if name not in output] == []


def test_the_help_loads_neither_temporal_nor_an_sql_library() -> None:
    script = (
        "import sys, json; from perdure.cli import main;"
        "print(json.dumps([m for m in ('temporalio', 'sqlalchemy', 'sqlmodel', 'rich')"
        " if m in sys.modules]))"
    )

    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert json.loads(loaded.stdout) == []


def test_our_errors_are_one_line_on_standard_error_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise PortTaken("something listens on 127.0.0.1:1; choose another port")

    monkeypatch.setattr(program, "cli", fail)

    with pytest.raises(SystemExit) as exit_:
        main()

    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "perdure: something listens on 127.0.0.1:1; choose another port (port_taken)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("dev", "nowhere.at.all:app"), "nowhere.at.all"),
        (("dev", "perdure.examples.order_desk"), "package.module:attribute"),
        (("worker", "--app", "json:dumps"), "not a perdure.App"),
        (("ask", "order-desk", "hello", "--conversation", "a b"), "conversation_id"),
        (("ask", "order-desk", "   "), "message"),
        (("transcript", "c", "--store", "missing.db"), "missing.db"),
        (("turn", "show", "turn_1", "--store", "missing.db"), "missing.db"),
        (("turn", "show", "turn_1", "--store", "postgresql://u:secret@h/d"), "sqlite"),
    ],
)
def test_wrong_input_is_explained_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    ended = _perdure(tmp_path, *arguments)

    assert ended.returncode == 2
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "secret" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    ended = _perdure(tmp_path, "ask", "order-desk", "hello", TEMPORAL_ADDRESS="127.0.0.1:1")

    assert ended.returncode == 2
    assert "127.0.0.1:1" in ended.stderr


def test_a_wrong_setting_is_named_without_its_value(tmp_path: Path) -> None:
    ended = _perdure(tmp_path, "turn", "show", "turn_1", PERDURE_GRACE_S="canary")

    assert ended.returncode == 2
    assert "PERDURE_GRACE_S" in ended.stderr
    assert "canary" not in ended.stderr


def _perdure(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_server_a_command_says_so_in_one_line_and_leaves_with_code_2() -> None:
    command = [sys.executable, "-m", "perdure.cli.main", "ask", "order-desk", "Hello"]
    environment = {**os.environ, "TEMPORAL_ADDRESS": "127.0.0.1:1"}

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "server_unreachable" in done.stderr
