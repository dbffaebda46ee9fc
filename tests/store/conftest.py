"""The `store` fixture of this room: as everywhere, but a file is a copy of one that is ready.

Making the schema is most of what a short test takes. That it is made well is tested on new files.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.stores import Store, open_store


@pytest.fixture(scope="session")
def ready_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An empty ledger."""
    path = tmp_path_factory.mktemp("ready") / "ledger.db"
    open_store(f"sqlite:///{path}").close()
    return path.read_bytes()


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, ready_file: bytes) -> Iterator[Store]:
    """One suite for every store."""
    url = "sqlite://"
    if request.param == "file":
        path = tmp_path / "ledger.db"
        path.write_bytes(ready_file)
        url = f"sqlite:///{path}"
    opened = open_store(url)
    yield opened
    opened.close()
