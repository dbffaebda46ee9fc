"""`perdure transcript` and `perdure turn show`: what the ledger holds, for people or as JSON."""

import json

from perdure.cli.reading import open_reader
from perdure.cli.render import make_console, print_entry
from perdure.cli.render_turn import print_details
from perdure.contracts.errors import ConversationMissing, InvalidRequest
from perdure.contracts.events import ReconcileReported, RecoveryDecided
from perdure.settings import load_settings


def show_transcript(
    conversation_id: str,
    namespace: str,
    after: int,
    limit: int,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Print a conversation's messages. Raises ConversationMissing if there are none at all."""
    with open_reader(load_settings(store=store).store_url) as reader:
        entries = reader.transcript(namespace, conversation_id, after=after, limit=limit)
        if not entries and not reader.transcript(namespace, conversation_id, limit=1):
            raise ConversationMissing(
                f"there is no conversation {conversation_id!r} in namespace {namespace!r}"
            )
    console = make_console()
    for entry in entries:
        if as_json:
            print(json.dumps(entry.model_dump(mode="json")))
        else:
            print_entry(console, entry)


def show_turn(turn_id: str, store: str | None, *, as_json: bool) -> None:
    """Print everything that happened in a turn. Raises InvalidRequest if there is no such turn."""
    with open_reader(load_settings(store=store).store_url) as reader:
        details = reader.details(turn_id)
        if details is None:
            raise InvalidRequest(f"there is no turn {turn_id!r} in this ledger")
        recoveries = [
            recorded.event
            for recorded in reader.turn_events(turn_id)
            if isinstance(recorded.event, ReconcileReported | RecoveryDecided)
        ]
    if as_json:
        found = details.model_dump(mode="json")
        found["recoveries"] = [event.model_dump(mode="json") for event in recoveries]
        print(json.dumps(found))
    else:
        print_details(make_console(), details, recoveries)
