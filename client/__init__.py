"""What other services import: start a turn, wait for it, follow it.

Loads no SQL library: whoever can read the ledger passes a `reader`
(`perdure.stores.queries.Reader` in process).
"""

from perdure.client.following import Follow, LedgerReader, Restarted, TextPiece, follow
from perdure.client.turns import TurnHandle, start, wait

__all__ = [
    "Follow",
    "LedgerReader",
    "Restarted",
    "TextPiece",
    "TurnHandle",
    "follow",
    "start",
    "wait",
]
