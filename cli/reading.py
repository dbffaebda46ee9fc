"""Opening the ledger for a command that only reads: it never creates a database."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.contracts.errors import StoreUnreadable

if TYPE_CHECKING:
    from perdure.stores.queries import Reader


def shown_url(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"://([^:/@]*):[^@/]*@", r"://\1:***@", url)


def missing_file(url: str) -> Path | None:
    """The SQLite file that the URL names, if it does not exist."""
    prefix, _, path = url.partition(":///")
    if not prefix.startswith("sqlite") or not path or path.startswith((":memory:", "file:")):
        return None
    file = Path(path.partition("?")[0])
    return None if file.exists() else file


@contextmanager
def open_reader(url: str) -> "Generator[Reader, None, None]":
    """A reader of an existing ledger. Raises StoreUnreadable if there is none."""
    from perdure.stores import open_store
    from perdure.stores.queries import Reader

    missing = missing_file(url)
    if missing is not None:
        raise StoreUnreadable(
            f"there is no database at {missing}; name the ledger with --store or PERDURE_STORE_URL"
        )
    store = open_store(url, migrating=False)
    try:
        yield Reader(store)
    finally:
        store.close()
