"""Checkpoints: one row with kind, schema version and a compare-and-swap revision.

Any kind can be stored; a reader asks for the kind and version it understands (seed 1.2 #2-4).
"""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from perdure.contracts.canonical import canonical_json, sanitised
from perdure.contracts.errors import (
    CheckpointConflict,
    CheckpointMissing,
    CheckpointUnsupported,
    LedgerCorruption,
)
from perdure.stores.clock import now
from perdure.stores.rows import find_row, insert_new, update_rows
from perdure.stores.tables import CHECKPOINTS

TURN_KIND = "perdure.turn"
TURN_SCHEMA_VERSION = 1


class Checkpoint(BaseModel):
    """A checkpoint of any kind; the turn engine reads only its own."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    checkpoint_id: str = Field(min_length=1)
    kind: str = Field(min_length=1)
    schema_version: int = Field(ge=1)
    revision: int = Field(default=0, ge=0)
    payload: dict[str, Any] = Field(default_factory=dict)

    def next(self, payload: dict[str, Any]) -> "Checkpoint":
        """The same checkpoint one revision later."""
        return self.model_copy(update={"revision": self.revision + 1, "payload": payload})

    def require(self, kind: str, schema_version: int) -> "Checkpoint":
        """This checkpoint, if the caller understands it. Raises CheckpointUnsupported."""
        if self.kind != kind or self.schema_version > schema_version:
            raise CheckpointUnsupported(
                f"checkpoint {self.checkpoint_id} is {self.kind} version {self.schema_version}; "
                f"this program reads {kind} up to version {schema_version}"
            )
        return self


def load_checkpoint(tx: Connection, checkpoint_id: str) -> Checkpoint:
    """Raises CheckpointMissing, or LedgerCorruption if the stored payload is no object."""
    row = find_row(tx, CHECKPOINTS, checkpoint_id=checkpoint_id)
    if row is None:
        raise CheckpointMissing(f"there is no checkpoint {checkpoint_id}")
    try:
        return Checkpoint(
            checkpoint_id=row.checkpoint_id,
            kind=row.kind,
            schema_version=row.schema_version,
            revision=row.revision,
            payload=json.loads(row.payload),
        )
    except ValueError:
        raise LedgerCorruption("checkpoint", f"{checkpoint_id} cannot be decoded") from None


def is_stored(tx: Connection, checkpoint: Checkpoint) -> bool:
    """Whether exactly this checkpoint is the stored one."""
    values = _values(checkpoint)
    query = select(*(CHECKPOINTS.c[name] for name in values)).where(
        CHECKPOINTS.c.checkpoint_id == checkpoint.checkpoint_id
    )
    row = tx.execute(query).mappings().one_or_none()
    return row is not None and dict(row) == values


def swap_checkpoint(tx: Connection, checkpoint: Checkpoint, expected: int | None) -> None:
    """Write a checkpoint if the stored revision is `expected`; None creates it at revision 0.

    Raises CheckpointConflict for any other stored or new revision, CheckpointMissing if there is
    nothing to replace (seed 1.2 #3).
    """
    if checkpoint.revision != (0 if expected is None else expected + 1):
        raise CheckpointConflict(
            f"checkpoint {checkpoint.checkpoint_id} cannot go from revision {expected} "
            f"to {checkpoint.revision}"
        )
    values = {**_values(checkpoint), "updated_at": now()}
    if expected is None:
        if not insert_new(tx, CHECKPOINTS, {"checkpoint_id": checkpoint.checkpoint_id, **values}):
            raise CheckpointConflict(f"checkpoint {checkpoint.checkpoint_id} exists already")
        return
    key = {"checkpoint_id": checkpoint.checkpoint_id, "revision": expected}
    if update_rows(tx, CHECKPOINTS, key, **values) != 1:
        stored = load_checkpoint(tx, checkpoint.checkpoint_id)
        raise CheckpointConflict(
            f"checkpoint {checkpoint.checkpoint_id} is at revision {stored.revision}, "
            f"not {expected}"
        )


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "kind": checkpoint.kind,
        "schema_version": checkpoint.schema_version,
        "revision": checkpoint.revision,
        "payload": canonical_json(sanitised(checkpoint.payload)),
    }


def advance_turn_checkpoint(tx: Connection, turn_id: str, payload: dict[str, Any]) -> None:
    """Move a turn's own checkpoint one revision on."""
    stored = load_checkpoint(tx, turn_id).require(TURN_KIND, TURN_SCHEMA_VERSION)
    swap_checkpoint(tx, stored.next(payload), stored.revision)
