"""The page on providers says what the code does."""

import re
from pathlib import Path

from perdure.activities.providers.part_table import MEDIA_BY_PROTOCOL
from perdure.agents.endpoint import PROTOCOLS
from perdure.contracts.errors import ModelError, ModelScriptError

PAGE = (Path(__file__).resolve().parents[2] / "docs/providers.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in found[2:]]


def test_the_table_of_errors_has_each_code_and_whether_it_is_retried() -> None:
    def below(kind: type[ModelError]) -> set[type[ModelError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    kinds = {kind for kind in below(ModelError) if kind.__module__.startswith("perdure.")}
    expected = {
        kind.code: "yes" if kind.retryable_by_default else "no"
        for kind in kinds - {ModelError, ModelScriptError}
    }

    documented = {row[0].strip("`"): row[1] for row in rows("Errors")}

    assert documented == expected


def test_the_table_of_parts_is_the_one_that_is_asked() -> None:
    documented = {
        re.findall(r"`([^`]+)`", row[0])[0]: tuple(re.findall(r"`([^`]+)`", row[1]))
        for row in rows("Parts")
        if row[1] != "none"
    }

    shown = {
        protocol: tuple(f"{kind}*" if kind.endswith("/") else kind for kind in taken)
        for protocol, taken in MEDIA_BY_PROTOCOL.items()
    }
    assert documented == shown


def test_every_protocol_of_an_endpoint_is_named() -> None:
    assert [name for name in PROTOCOLS if f"`{name}`" not in PAGE] == []
