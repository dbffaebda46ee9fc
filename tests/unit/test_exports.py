"""The public surface: what `perdure` exports, that it is light, and a whole tree of errors."""

import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

import perdure
from perdure.contracts import errors
from perdure.contracts.errors import PerdureError


def error_classes(base: type[PerdureError] = PerdureError) -> Iterator[type[PerdureError]]:
    """The class and everything below it, in our package; tests define errors of their own."""
    if base.__module__.startswith("perdure."):
        yield base
    for child in base.__subclasses__():
        yield from error_classes(child)


ERROR_CLASSES = sorted(set(error_classes()), key=lambda item: item.__name__)


def loaded_by(statement: str) -> set[str]:
    """What a fresh interpreter has loaded after the statement."""
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("name", perdure.__all__)
def test_every_exported_name_can_be_had(name: str) -> None:
    assert getattr(perdure, name) is not None


def test_the_surface_lists_exactly_its_exports() -> None:
    assert dir(perdure) == sorted(perdure.__all__)
    assert len(set(perdure.__all__)) == len(perdure.__all__)


def test_what_an_author_needs_is_exported() -> None:
    wanted = {"App", "Agent", "tool", "ToolContext", "ReplaySafety", "errors"}

    assert wanted <= set(perdure.__all__)


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'perdure' has no attribute 'Agnet'"):
        _ = perdure.Agnet  # type: ignore[attr-defined]


def test_importing_perdure_loads_nothing_heavy() -> None:
    loaded = loaded_by("import perdure")

    heavy = {"temporalio", "sqlmodel", "sqlalchemy", "pydantic", "typer", "rich", "yaml"}
    assert not loaded & heavy
    assert not [name for name in loaded if name.startswith("perdure.")]


def test_importing_the_authoring_names_loads_no_temporal_and_no_sql() -> None:
    loaded = loaded_by("from perdure import App, Agent, tool, ToolContext, ReplaySafety, errors")

    assert not loaded & {"temporalio", "sqlmodel", "sqlalchemy"}


def test_the_public_errors_module_is_the_contracts_one() -> None:
    assert isinstance(perdure.errors, ModuleType)
    assert perdure.errors is errors


def test_each_error_has_a_code_of_its_own() -> None:
    # Sharing a parent's code would make two failures one to whoever reads the failure type.
    inherited = [item.__name__ for item in ERROR_CLASSES if "code" not in vars(item)]
    twice = [
        code for code, times in Counter(item.code for item in ERROR_CLASSES).items() if times > 1
    ]

    assert inherited == []
    assert twice == []


def test_codes_are_plain_words() -> None:
    odd = [item.code for item in ERROR_CLASSES if not item.code.replace("_", "").islower()]

    assert odd == []


def test_the_picture_of_the_tree_shows_every_error_of_its_module() -> None:
    picture = set((errors.__doc__ or "").replace("·", " ").split())
    missing = [name for name, _ in inspect.getmembers(errors, _is_error) if name not in picture]

    assert missing == []


def test_the_picture_of_the_tree_shows_no_error_that_is_gone() -> None:
    tree = (errors.__doc__ or "").split("\n\n")[1]
    # A name stands at the head of its line, or between dots; explanations begin in lower case.
    names = [word for word in tree.replace("·", " ").split() if word[:1].isupper()]

    assert [name for name in names if not hasattr(errors, name)] == []


def _is_error(item: object) -> bool:
    return inspect.isclass(item) and issubclass(item, PerdureError)
