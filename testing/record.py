"""`python -m perdure.testing.record FOLDER`: write histories of turns for a replay check.

It reads from the Temporal server of the environment, as `perdure worker` does, and changes nothing.
"""

import argparse
import asyncio
import sys

from perdure.cli.stopping import leave
from perdure.contracts.errors import PerdureError, ServerUnreachable
from perdure.settings import connect
from perdure.testing.histories import HISTORIES_MAX, TURNS, record_histories


async def _record(folder: str, query: str, limit: int) -> int:
    return len(await record_histories(await connect(), folder, query=query, limit=limit))


def main(arguments: list[str] | None = None) -> int:
    """Write the newest histories of turns into a folder, one JSON file for each run."""
    parser = argparse.ArgumentParser(
        prog="python -m perdure.testing.record", description=main.__doc__
    )
    parser.add_argument("folder", help="where the files go")
    parser.add_argument("--query", default=TURNS, help=f"Temporal list filter (default: {TURNS})")
    parser.add_argument("--limit", type=int, default=HISTORIES_MAX, help="at most that many")
    parsed = parser.parse_args(arguments)
    try:
        count = asyncio.run(_record(parsed.folder, parsed.query, parsed.limit))
    except PerdureError as error:
        print(f"perdure: {error}", file=sys.stderr)
        if isinstance(error, ServerUnreachable):
            leave(2)
        return 2
    print(f"{count} histories in {parsed.folder}")
    return 0 if count else 1


if __name__ == "__main__":
    raise SystemExit(main())
