"""`docs/seeds.md` names only tests that exist, and every row that this version has to meet."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "docs" / "seeds.md").read_text().splitlines()
ROW = re.compile(r"\| (\d+) \| (seed|upstream) \| .+ \| `(tests/\S+)::(test_\w+)` \| .*\|")


def _table(chapter: str) -> list[re.Match[str]]:
    start = next(number for number, line in enumerate(LINES) if line.startswith(f"## {chapter}"))
    body: list[str] = []
    for line in LINES[start + 1 :]:
        if line.startswith("## "):
            break
        body.append(line)
    found = [(line, ROW.fullmatch(line)) for line in body if line.startswith("| ")]
    unread = [line for line, match in found[1:] if match is None]
    assert unread == []
    return [match for _, match in found if match is not None]


def test_every_test_that_is_named_exists() -> None:
    named = {(match[3], match[4]) for match in [*_table("Seed 000"), *_table("Seed 002")]}

    for path in sorted({path for path, _ in named}):
        tree = ast.parse((ROOT / path).read_text())
        there = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        missing = {test for named_path, test in named if named_path == path} - there
        assert missing == set(), path


def test_every_row_that_this_version_meets_is_there() -> None:
    kernel = {int(match[1]) for match in _table("Seed 000")}
    harness = {int(match[1]) for match in _table("Seed 002")}

    assert kernel >= {4, *range(11, 17), 33, 34, 35, 41}
    assert harness >= set(range(1, 14))
