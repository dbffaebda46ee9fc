"""The style that a machine can hold: sizes, names, docstrings, clocks, exceptions, left-overs.

Each check takes a path and a text and returns lines of the form `path:line: error`. Each has a test
on a text that breaks it, so that none can pass in silence.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LINE_CHARS_MAX = 100
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 500

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MIGRATIONS = "stores/migrations/"
DOCUMENTED_ROOMS = ("contracts/", "client/", "stores/", "agents/")
CLOCKS_ALLOWED = ("cli/", "examples/", "benchmarks/", "tests/", "stores/clock.py")
CLOCKS = {
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "datetime.date.today",
    "time.time",
    "time.time_ns",
}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".mako", ""}
# Written so that this file does not find itself.
LEFT_OVER = re.compile(r"\b(?:TO[D]O|FIXM[E]|XX[X])\b")
BUILD_OUTPUT = re.compile(
    r"(^|/)(__pycache__|[^/]+\.egg-info|\.venv|\.(pytest|ruff)_cache|\.hypothesis)(/|$)"
    r"|^(build|dist)/|\.(pyc|pyo|whl|db|db-wal|db-shm|sqlite3?)$"
)
MACHINE_COMMENT = re.compile(r"#\s*(noqa|type:|pyright:|pragma:|ruff:|fmt:)")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Check = Callable[[str, str], list[str]]


def too_long(path: str, text: str) -> list[str]:
    """Lines, functions and modules over their bound; migrations may be as long as they must."""
    errors = [
        f"{path}:{number}: line of {len(line)} characters, at most {LINE_CHARS_MAX}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > LINE_CHARS_MAX
    ]
    if path.startswith(MIGRATIONS):
        return errors
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                bound = f"{lines} lines, at most {FUNCTION_LINES_MAX}"
                errors.append(f"{path}:{node.lineno}: function {node.name} has {bound}")
    lines = len(text.splitlines())
    if lines > MODULE_LINES_MAX:
        errors.append(f"{path}:{lines}: module has {lines} lines, at most {MODULE_LINES_MAX}")
    return errors


def banned_name(path: str, text: str) -> list[str]:
    """Modules whose name says nothing."""
    words = {
        word for part in Path(path).with_suffix("").parts for word in part.strip("_").split("_")
    }
    return [f"{path}:1: a module must not be named {word}" for word in words & BANNED_NAMES]


def module_docstring(path: str, text: str) -> list[str]:
    """Modules that do not say what they are for."""
    words = (ast.get_docstring(ast.parse(text)) or "").split()
    return [] if len(words) > 1 else [f"{path}:1: the module does not say what it is for"]


def public_docstrings(path: str, text: str) -> list[str]:
    """Public classes, functions and methods without a docstring, in the rooms that others read."""
    if not path.startswith(DOCUMENTED_ROOMS) or path.startswith(MIGRATIONS):
        return []
    return [
        f"{path}:{node.lineno}: {node.name} has no docstring"
        for node in _public(ast.parse(text))
        if not ast.get_docstring(node)
    ]


def _public(parent: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | Function]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            if not any("overload" in ast.unparse(item) for item in node.decorator_list):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def clock_outside_its_place(path: str, text: str) -> list[str]:
    """Wall clocks where time must be injected, the database's or the workflow's."""
    if path.startswith(CLOCKS_ALLOWED):
        return []
    tree = ast.parse(text)
    origins = _origins(tree)
    # An attribute's own base is walked as well; only whole names are in the table.
    return [
        f"{path}:{node.lineno}: {name} reads the wall clock outside its place"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and (name := _full_name(node, origins)) in CLOCKS
    ]


def _origins(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                origins[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return origins


def _full_name(node: ast.expr, origins: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, origins)}.{node.attr}"
    return origins.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def unexplained_catch_all(path: str, text: str) -> list[str]:
    """Handlers of every exception without the reason in a comment on or beside their line.

    One that cleans up and raises the same exception again needs no reason.
    """
    comments = _comment_lines(text)
    return [
        f"{path}:{node.lineno}: catches every exception and no comment says why"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and _catches_all(node)
        and not comments & {node.lineno - 1, node.lineno, node.lineno + 1}
    ]


def _catches_all(node: ast.ExceptHandler) -> bool:
    last = node.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if node.type is None:
        return True
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    names = {item.id for item in caught if isinstance(item, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def _comment_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not MACHINE_COMMENT.match(token.string)
    }


def left_over(path: str, text: str) -> list[str]:
    """Notes to ourselves; they belong in an issue."""
    return [
        f"{path}:{number}: a note is left over"
        for number, line in enumerate(text.splitlines(), 1)
        if LEFT_OVER.search(line)
    ]


def build_output(path: str, text: str) -> list[str]:
    """Files that are made, not written."""
    return [f"{path}:1: build output is tracked"] if BUILD_OUTPUT.search(path) else []


PYTHON_CHECKS: tuple[Check, ...] = (
    too_long,
    banned_name,
    module_docstring,
    public_docstrings,
    clock_outside_its_place,
    unexplained_catch_all,
)


def tracked_files() -> list[str]:
    """What is in the repository, or would be after `git add`."""
    # The folder may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached"]
    command += ["--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for path in set(done.stdout.split("\0")) if (ROOT / path).is_file())


FILES = tracked_files()
PYTHON_FILES = [path for path in FILES if path.endswith(".py")]


def _errors(paths: list[str], check: Check) -> str:
    found = [error for path in paths for error in check(path, (ROOT / path).read_text())]
    return "".join(f"\n{error}" for error in found)


@pytest.mark.parametrize("check", PYTHON_CHECKS)
def test_the_code_is_tidy(check: Check) -> None:
    assert not (errors := _errors(PYTHON_FILES, check)), errors


def test_no_note_to_ourselves_is_left_over() -> None:
    texts = [path for path in FILES if Path(path).suffix in TEXT_SUFFIXES]

    assert not (errors := _errors(texts, left_over)), errors


def test_no_build_output_is_tracked() -> None:
    errors = [error for path in FILES for error in build_output(path, "")]

    assert not errors, "\n".join(errors)


def test_the_checks_see_the_whole_repository() -> None:
    rooms = {path.split("/")[0] for path in PYTHON_FILES}

    assert rooms >= {"__init__.py", "contracts", "agents", "stores", "workflows", "tests"}
    assert {"Makefile", "pyproject.toml", "README.md"} <= set(FILES)


LONG_LINE = f'"""Two words."""\nx = "{"x" * 95}"\n'
LONG_FUNCTION = "def f():\n" + "    pass\n" * 70
LONG_MODULE = "x = 1\n" * 501
NO_METHOD_DOCSTRING = '''class Public:
    """Documented."""

    def method(self): ...
'''
CAUGHT = "try:\n    f()\nexcept {what}:{comment}\n    pass\n"


@pytest.mark.parametrize(
    ("check", "path", "text", "error"),
    [
        (too_long, "a.py", LONG_LINE, "a.py:2: line of 101 characters"),
        (too_long, "a.py", LONG_FUNCTION, "a.py:1: function f has 71 lines"),
        (too_long, "a.py", "async " + LONG_FUNCTION, "a.py:1: function f has 71 lines"),
        (too_long, "a.py", LONG_MODULE, "a.py:501: module has 501 lines"),
        (too_long, "stores/migrations/versions/1.py", LONG_LINE, "line of 101 characters"),
        (banned_name, "stores/utils.py", "", "stores/utils.py:1: a module must not be named"),
        (banned_name, "helpers/__init__.py", "", "must not be named helpers"),
        (banned_name, "tests/_store_helpers.py", "", "must not be named helpers"),
        (module_docstring, "a.py", "x = 1", "a.py:1: the module does not say"),
        (module_docstring, "a.py", '"""Word."""', "a.py:1: the module does not say"),
        (public_docstrings, "client/a.py", "def f(): ...", "client/a.py:1: f has no docstring"),
        (public_docstrings, "agents/a.py", "async def f(): ...", "f has no docstring"),
        (public_docstrings, "stores/a.py", NO_METHOD_DOCSTRING, "a.py:4: method has no docstring"),
        (clock_outside_its_place, "a.py", "import time\nx = time.time()", "a.py:2: time.time"),
        (clock_outside_its_place, "a.py", "from time import time as t\nt()", "a.py:2: time.time"),
        (clock_outside_its_place, "a.py", "import datetime as d\nd.datetime.now()", "a.py:2:"),
        (clock_outside_its_place, "a.py", "from datetime import datetime\nf(datetime.now)", "a.py"),
        (clock_outside_its_place, "a.py", "from datetime import date\ndate.today()", "a.py:2:"),
        (unexplained_catch_all, "a.py", CAUGHT.format(what="Exception", comment=""), "a.py:3:"),
        (
            unexplained_catch_all,
            "a.py",
            CAUGHT.format(what="(OSError, Exception)", comment=""),
            "3:",
        ),
        (unexplained_catch_all, "a.py", "try:\n    f()\nexcept:\n    pass", "a.py:3:"),
        (
            unexplained_catch_all,
            "a.py",
            CAUGHT.format(what="BaseException", comment="  # noqa: BLE001"),
            "a.py:3:",
        ),
        (left_over, "a.md", "x\n# TO" + "DO: later", "a.md:2: a note"),
        (left_over, "a.py", "# FIX" + "ME", "a.py:1: a note"),
        (build_output, "stores/__pycache__/a.pyc", "", "build output"),
        (build_output, "perdure.egg-info/PKG-INFO", "", "build output"),
        (build_output, "build/lib/perdure/a.py", "", "build output"),
        (build_output, "examples/orders.db", "", "build output"),
    ],
)
def test_a_check_finds_what_it_is_for(check: Check, path: str, text: str, error: str) -> None:
    found = check(path, text)

    assert len(found) == 1
    assert error in found[0]


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (too_long, "a.py", "x = 1\n" * 500),
        (too_long, "stores/migrations/versions/1.py", LONG_FUNCTION + LONG_MODULE),
        (banned_name, "stores/commonality.py", ""),
        (module_docstring, "a.py", '"""Two words."""'),
        (public_docstrings, "workflows/a.py", "def f(): ..."),
        (public_docstrings, "client/a.py", "def _f(): ...\nclass _P:\n    def f(self): ..."),
        (public_docstrings, "client/a.py", "@overload\ndef f(): ..."),
        (clock_outside_its_place, "stores/clock.py", "import time\nx = time.time()"),
        (clock_outside_its_place, "a.py", "import time\nx = time.monotonic()"),
        (clock_outside_its_place, "a.py", "from temporalio import workflow\nworkflow.now()"),
        (unexplained_catch_all, "a.py", CAUGHT.format(what="OSError", comment="")),
        (unexplained_catch_all, "a.py", CAUGHT.format(what="Exception", comment="  # The edge.")),
        (unexplained_catch_all, "a.py", "try:\n    f()\n# The edge.\nexcept Exception:\n    pass"),
        (unexplained_catch_all, "a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
        (left_over, "a.py", "PHOTODOC = 1"),
        (build_output, "docs/distribution/build.md", ""),
    ],
)
def test_a_check_lets_good_text_pass(check: Check, path: str, text: str) -> None:
    assert check(path, text) == []
