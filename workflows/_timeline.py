"""What an operator reads in the Temporal UI: a short timeline of the turn that names recoveries.

Pure functions from what just happened to lines of Markdown. They decide nothing, and nothing of the
conversation's text is in them.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from perdure.contracts.calls import CallReply, CallReplyKind, StepKind, StepReply
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ResultStatus
from perdure.contracts.turn import TurnStatus
from perdure.workflows._decide import CallState, Phase, Problem, TurnState

LINES_MAX: Final = 40

_DOING: Final = {
    Phase.MODEL: "asking the model",
    Phase.TOOLS: "running tools",
    Phase.FOLLOW: "following: another workflow runs this turn",
    Phase.END: "ending",
    Phase.DONE: "done",
    Phase.REFUSED: "refused",
}
_LOST: Final = {
    ResultReason.WORKER_LOST: "its worker was lost",
    ResultReason.TIMED_OUT: "it did not end within its time",
    ResultReason.UNKNOWN_OUTCOME: "its reconcile function cannot tell",
    ResultReason.TURN_CANCELLED: "the turn was cancelled",
    ResultReason.TURN_FAILED: "the turn failed",
}


def step_lines(state: TurnState, happened: StepReply | Problem) -> list[str]:
    """How a model step went."""
    lines: list[str] = []
    if state.opening is not None and state.opening.take_over is not None:
        lines.append("**taken over**: the workflow that ran this turn before is gone")
    if isinstance(happened, Problem):
        return [*lines, f"step {state.step}: **{happened.code}**"]
    if happened.kind is StepKind.FOLLOW:
        return [*lines, "another workflow runs this turn; following it"]
    lost = happened.attempts - 1 - happened.model_errors
    if lost > 0:
        lines.append(
            f"step {state.step}: **worker lost** during the model call; asked again ({lost}x)"
        )
    if happened.model_errors:
        lines.append(f"step {state.step}: the model reported an error {happened.model_errors}x")
    if happened.kind is StepKind.CALLS:
        names = ", ".join(f"`{call.tool}`" for call in happened.calls)
        lines.append(f"step {state.step}: the model asked for {names or 'nothing that can run'}")
    return lines


def call_lines(ended: CallState) -> list[str]:
    """How one call went."""
    name = f"`{ended.call.tool}` ({ended.call.safety})"
    reply = ended.reply
    if isinstance(reply, Problem):
        return [f"{name}: **{reply.code}**"]
    if reply is None or reply.kind is not CallReplyKind.SETTLED:
        return []
    lines = [f"{name}: {_told(ended, reply)}"]
    if reply.late:
        lines.append(
            f"{name}: a **late result** came; it is kept beside and the model was not told"
        )
    return lines


def _told(ended: CallState, reply: CallReply) -> str:
    why = _LOST.get(reply.reason) if reply.reason is not None else None
    match reply.status:
        case ResultStatus.INTERRUPTED:
            return f"**interrupted**: {why or 'its outcome is unknown'}; it may have taken effect"
        case ResultStatus.NOT_EXECUTED:
            return "**settled** without running: no worker could run it"
        case ResultStatus.REFUSED:
            return "refused"
        case ResultStatus.OK | ResultStatus.ERROR:
            return _ran(ended, reply)


def _ran(ended: CallState, reply: CallReply) -> str:
    status = reply.status.value
    if reply.generation < 2:
        return f"**reconciled**: it had taken effect; {status}" if ended.looked else status
    if ended.call.safety is ReplaySafety.RECONCILED:
        return (
            f"**rerun** (generation {reply.generation}) once it was known not to have run; {status}"
        )
    return f"**rerun** (generation {reply.generation}); {status}"


def end_line(state: TurnState) -> str:
    """How the turn ended."""
    result = state.result
    if result is None:
        return "the turn was **refused**; nothing was written"
    if result.status is TurnStatus.COMPLETED:
        return f"**completed** ({result.stop_reason})"
    return f"**{result.status.value}**: {result.stop_reason}"


def noted(state: TurnState, lines: Sequence[str], now: datetime) -> TurnState:
    """The state with these lines behind its timeline; the oldest are dropped beyond 40."""
    if not lines:
        return state
    stamped = tuple(f"{now:%H:%M:%S} {line}" for line in lines)
    return state.model_copy(update={"timeline": (*state.timeline, *stamped)[-LINES_MAX:]})


def details(state: TurnState) -> str:
    """The whole text for the UI."""
    turn = state.turn
    head = f"**{state.agent}** · conversation `{turn.conversation_id}` · turn `{turn.turn_id}`"
    doing = f"step {state.step} · {_DOING[state.phase]}"
    listed = "\n".join(f"- {line}" for line in state.timeline)
    return f"{head}\n\n{doing}\n\n{listed}\n\nMore: `perdure turn show {turn.turn_id}`"
