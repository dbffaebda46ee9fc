"""What the command line prints of other people's text is text, whatever they wrote."""

from datetime import UTC, datetime

import pytest

from perdure.cli.reading import missing_file, shown_url
from perdure.cli.render import clean, make_console, print_entry, short
from perdure.contracts.conversation import TranscriptEntry
from perdure.contracts.messages import Message, Role, ToolCallPart, ToolResultPart, user_message
from perdure.settings import store_url


@pytest.mark.parametrize("code", ["\x1b[2J", "\x07", "\x9b31m", "\u202e", "\r"])
def test_nothing_a_terminal_would_act_on_gets_through(code: str) -> None:
    assert code[0] not in clean(f"a{code}b")


def test_lines_and_tabs_stay() -> None:
    assert clean("a\r\nb\tc\n") == "a\nb\tc\n"


def test_a_short_text_is_one_line_with_an_ellipsis() -> None:
    assert short("a\nb  c", 10) == "a b c"
    assert short("x" * 300, 10) == "x" * 9 + "…"


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    printed = _print(user_message("[bold]not bold[/bold] [/oops]"))

    assert "[bold]not bold[/bold] [/oops]" in printed


def test_calls_and_results_name_their_tool() -> None:
    call = ToolCallPart(call_id="1", name="refund_order", arguments={"order": 2})
    result = ToolResultPart(call_id="1", name="refund_order", text="done")

    assert '→ refund_order {"order": 2}' in _print(Message(role=Role.ASSISTANT, parts=(call,)))
    assert "← refund_order done" in _print(Message(role=Role.TOOL, parts=(result,)))


def test_a_password_is_not_shown() -> None:
    assert shown_url("postgresql+psycopg://me:secret@host/db") == (
        "postgresql+psycopg://me:***@host/db"
    )
    assert shown_url("sqlite:///a/b.db") == "sqlite:///a/b.db"


def test_a_store_is_named_by_url_or_by_path() -> None:
    assert store_url("a/b.db") == "sqlite:///a/b.db"
    assert store_url("sqlite://") == "sqlite://"


def test_only_a_missing_file_counts_as_missing() -> None:
    assert str(missing_file("sqlite:////no/such.db")) == "/no/such.db"
    assert missing_file(f"sqlite:///{__file__}") is None
    assert missing_file("sqlite://") is None
    assert missing_file("postgresql://host/db") is None


def _print(message: Message) -> str:
    console = make_console()
    entry = TranscriptEntry(sequence=1, version=1, message=message, recorded_at=datetime.now(UTC))
    with console.capture() as capture:
        print_entry(console, entry)
    return capture.get()
