"""How `perdure demo` tells a scene, and where it sends its reader afterwards."""

from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from perdure.cli.demo_scenes import Check, Facts, Scene, times
from perdure.cli.demo_stage import Stage
from perdure.cli.dev_server import HOST, UI_PORT_DEFAULT
from perdure.cli.render import short

_SQL = (
    "SELECT tool, safety, status, generation FROM operations",
    "SELECT operation_id, generation, worker, outcome FROM operation_attempts",
    "SELECT seq, kind FROM events WHERE turn_id = '{turn_id}' ORDER BY seq",
)


def print_scene(
    console: Console, number: str, scene: Scene, facts: Facts, checks: tuple[Check, ...]
) -> None:
    """The scene, what is true after it, and each promise."""
    console.print(Text.assemble((f"{number}  {scene.title}", "bold cyan"), f"  {scene.tool}"))
    lines = [
        ("asked", scene.message),
        ("killed", f"the worker, with SIGKILL, {scene.killed_when}"),
        ("promise", scene.promise),
        ("attempts", _attempts(facts)),
        ("effects", _effects(facts)),
        ("told", _told(facts)),
        ("answer", facts.answer),
        ("history", f"{facts.history_events} events, {facts.history_bytes} bytes"),
        ("", " → ".join(facts.activities)),
    ]
    for name, text in lines:
        console.print(Text.assemble((f"     {name:<9}", "dim"), short(text)))
    for check in checks:
        mark, style = ("✓", "green") if check.held else ("✗ NOT", "bold red")
        console.print(Text.assemble((f"     {mark} ", style), check.promise))
    console.print()


def print_where_to_look(console: Console, stage: Stage, last: Scene, *, staying: bool) -> None:
    """The UI, the commands and the SQL that show the same as the last scene."""
    ledger, turn_id = _relative(stage.ledger), last.turn_id
    console.print(Text("Where to look", "bold"))
    url = stage.server.ui_url
    if not staying:
        databases = f"--db {ledger} --temporal-db {_relative(stage.folder / 'temporal.db')}"
        console.print(Text(f"  start it again    perdure dev {stage.app} {databases}"))
        url = f"http://{HOST}:{UI_PORT_DEFAULT}"
    workflow = quote(last.workflow_id, safe="")
    console.print(Text(f"  the Temporal UI   {url}/namespaces/default/workflows/{workflow}"))
    console.print(Text(f"  one turn          perdure turn show {turn_id} --store {ledger}"))
    console.print(Text(f"  the ledger        sqlite3 {ledger}"))
    for query in _SQL:
        console.print(Text(f"                    {query.format(turn_id=turn_id)};"))
    console.print(Text(f"  the effects       sqlite3 {_relative(stage.desk / 'orders.db')}"))
    console.print(Text("                    SELECT tool, generation, pid FROM effects;"))


def _attempts(facts: Facts) -> str:
    recovered = f", recovery: {', '.join(facts.recoveries)}" if facts.recoveries else ""
    return f"the ledger allowed {facts.generations}{recovered}"


def _effects(facts: Facts) -> str:
    pids = ", ".join(str(pid) for pid in facts.start_pids)
    lasting = "" if facts.lasting is None else f"; in the world {times(facts.lasting)}"
    return f"begun {times(len(facts.start_pids))} (in process {pids}){lasting}"


def _told(facts: Facts) -> str:
    status = "nothing" if facts.told is None else facts.told.value
    if facts.told_text.startswith(status):
        return facts.told_text
    return f"{status}: {facts.told_text}"


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
