"""How `perdure demo` tells a scene, and where it sends its reader afterwards."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from perdure.cli.demo_scenes import Check, Facts, Scene
from perdure.cli.demo_stage import APP, Stage
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
        ("told", f"{facts.told.value if facts.told else 'nothing'}: {facts.told_text}"),
        ("answer", facts.answer),
        ("history", f"{facts.history_events} events, {facts.history_bytes} bytes: {_acts(facts)}"),
    ]
    for name, text in lines:
        console.print(Text.assemble((f"     {name:<9}", "dim"), short(text)))
    for check in checks:
        mark, style = ("✓", "green") if check.held else ("✗ NOT", "bold red")
        console.print(Text.assemble((f"     {mark} ", style), check.promise))
    console.print()


def print_where_to_look(console: Console, stage: Stage, turn_id: str, *, staying: bool) -> None:
    """The UI, the commands and the SQL that show the same."""
    ledger = _relative(stage.ledger)
    console.print(Text("Where to look", "bold"))
    if staying:
        console.print(Text(f"  the Temporal UI   {stage.server.ui_url} (until Ctrl-C)"))
    else:
        databases = f"--db {ledger} --temporal-db {_relative(stage.folder / 'temporal.db')}"
        console.print(Text(f"  the Temporal UI   perdure dev {APP} {databases}"))
    console.print(Text(f"  one turn          perdure turn show {turn_id} --store {ledger}"))
    console.print(Text(f"  the ledger        sqlite3 {ledger}"))
    for query in _SQL:
        console.print(Text(f"                    {query.format(turn_id=turn_id)};"))
    console.print(Text(f"  the effects       sqlite3 {_relative(stage.desk / 'orders.db')}"))
    console.print(Text("                    SELECT tool, generation, pid FROM effects;"))


def _attempts(facts: Facts) -> str:
    recovered = f", recovery: {', '.join(facts.recoveries)}" if facts.recoveries else ""
    return f"{facts.generations} allowed by the ledger{recovered}"


def _effects(facts: Facts) -> str:
    pids = ", ".join(str(pid) for pid in facts.start_pids)
    lasting = "" if facts.lasting is None else f"; in the world: {facts.lasting}"
    return f"begun {len(facts.start_pids)} times (in process {pids}){lasting}"


def _acts(facts: Facts) -> str:
    return ", ".join(facts.activities)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
