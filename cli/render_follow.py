"""How `perdure ask` shows a turn while it happens."""

import json

from rich.console import Console
from rich.text import Text

from perdure.cli.render import call_line, clean, result_line
from perdure.client import Follow, Restarted, TextPiece
from perdure.contracts.events import ToolCalled, ToolSettled, TurnEnded
from perdure.contracts.tools import ResultStatus


class FollowPrinter:
    """Prints a turn as it happens: text piece by piece, a line for each call and result."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._in_line = False
        self.ended = False

    def show(self, item: Follow) -> None:
        """Print one item of `client.follow`."""
        match item:
            case TextPiece():
                self._console.print(Text(clean(item.text)), end="")
                self._in_line = not item.text.endswith("\n")
            case Restarted():
                self._line(Text("(the worker was lost; the answer begins anew)", "yellow"))
            case ToolCalled():
                self._line(call_line(item.tool, json.dumps(item.arguments)))
            case ToolSettled():
                is_error = item.status is not ResultStatus.OK
                self._line(result_line(item.tool, item.text, is_error=is_error))
            case TurnEnded():
                self.ended = True
                self.finish()
            case _:
                pass

    def finish(self) -> None:
        """End the line of text that is not ended."""
        if self._in_line:
            self._console.print()
            self._in_line = False

    def _line(self, text: Text) -> None:
        self.finish()
        self._console.print(text)
