"""How `perdure turn show` tells a turn: steps, operations, attempts, recoveries, usage."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rich.console import Console
from rich.text import Text

from perdure.cli.render import clean, short, usage_text
from perdure.contracts.events import ReconcileReported, RecoveryDecided
from perdure.contracts.views import (
    GenerationView,
    ModelAttemptView,
    OperationView,
    TurnDetails,
    TurnView,
)

_STATUS_STYLES: Final = {"completed": "green", "failed": "red", "cancelled": "yellow"}
Recovery = ReconcileReported | RecoveryDecided


def print_details(console: Console, details: TurnDetails, recoveries: Sequence[Recovery]) -> None:
    """Everything the ledger holds of a turn, in the order in which it happened."""
    _print_head(console, details.turn)
    for owner in details.owners:
        reason = f"{owner.reason} as epoch {owner.epoch} by workflow {owner.workflow_id}"
        _print_line(console, "owner", f"{reason}, run {owner.run_id}")
    steps = {item.step for item in (*details.model_attempts, *details.operations)}
    for step in sorted(steps):
        console.print(Text(f"step {step}", "bold"))
        for attempt in details.model_attempts:
            if attempt.step == step:
                _print_model_attempt(console, attempt)
        for operation in details.operations:
            if operation.step == step:
                _print_operation(console, operation, recoveries)
    for partial in details.aborted_partials:
        _print_line(console, "aborted", f"{partial.subject}, attempt {partial.attempt}", "yellow")
        _print_line(console, "", short(partial.text))
    for late in details.late_results:
        what = f"{late.operation_id}, generation {late.generation}: {late.reason}"
        _print_line(console, "late", what, "yellow")
        _print_line(console, "", f"{late.status}: {short(late.text)}")
    if details.turn.answer is not None:
        console.print(Text("answer", "bold"))
        console.print(Text("  " + clean(details.turn.answer).replace("\n", "\n  ")))


def _print_head(console: Console, turn: TurnView) -> None:
    style = _STATUS_STYLES.get(turn.status.value, "cyan")
    why = f" ({turn.stop_reason})" if turn.stop_reason else ""
    console.print(Text.assemble((turn.turn_id, "bold"), "  ", (f"{turn.status.value}{why}", style)))
    if turn.detail:
        _print_line(console, "detail", short(turn.detail))
    names = f"agent {turn.agent}, conversation {turn.conversation_id}, request {turn.request_id}"
    _print_line(console, "of", f"{names}, namespace {turn.namespace}")
    took = "open" if turn.ended_at is None else _seconds(turn.opened_at, turn.ended_at)
    _print_line(console, "when", f"{turn.opened_at:%Y-%m-%d %H:%M:%S} UTC, {took}")
    _print_line(console, "usage", f"{turn.steps} steps, {usage_text(turn.usage)}")


def _print_model_attempt(console: Console, attempt: ModelAttemptView) -> None:
    took = "" if attempt.ended_at is None else _seconds(attempt.started_at, attempt.ended_at)
    error = f" {attempt.error_code}" if attempt.error_code else ""
    facts = [f"attempt {attempt.attempt}: {attempt.status}{error}", attempt.model, took]
    facts += [usage_text(attempt.usage), f"worker {attempt.worker}"]
    style = "" if attempt.status == "committed" else "yellow"
    _print_line(console, "model", ", ".join(filter(None, facts)), style)


def _print_operation(
    console: Console, operation: OperationView, recoveries: Sequence[Recovery]
) -> None:
    console.print(
        Text.assemble(
            ("  call      ", "dim"),
            (f"{clean(operation.tool)} ", "magenta"),
            f"{operation.safety} ",
            (short(operation.arguments, 120), "dim"),
        )
    )
    _print_line(console, "", operation.operation_id)
    for generation in operation.generations:
        _print_line(console, "", _generation(generation))
        for recovery in recoveries:
            if (recovery.operation_id, recovery.generation) == (
                operation.operation_id,
                generation.generation,
            ):
                _print_line(console, "", f"recovery: {_recovery(recovery)}", "yellow")
    result = "no result yet" if operation.status is None else _result(operation)
    _print_line(console, "result", result, "" if operation.status == "ok" else "yellow")


def _generation(generation: GenerationView) -> str:
    outcome = generation.outcome or ("stopped" if generation.stopped else "no outcome")
    at = f"{generation.started_at:%H:%M:%S}"
    return f"execution {generation.generation} at {at}: {outcome}, worker {generation.worker}"


def _recovery(recovery: Recovery) -> str:
    if isinstance(recovery, ReconcileReported):
        return f"reconcile said {recovery.observation.value}"
    return f"decided {recovery.decision.value}"


def _result(operation: OperationView) -> str:
    reason = f" ({operation.reason})" if operation.reason else ""
    flags = f" [{', '.join(operation.flags)}]" if operation.flags else ""
    return f"{operation.status}{reason}{flags}: {short(operation.text or '')}"


def _print_line(console: Console, name: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"  {name:<10}", "dim"), (clean(text), style)))


def _seconds(begin: datetime, end: datetime) -> str:
    return f"{(end - begin).total_seconds():.2f} s"
