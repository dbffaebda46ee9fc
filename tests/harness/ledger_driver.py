"""One turn, driven by ledger commands as the activities give them, and a look at every table.

`TurnDriver` remembers what a workflow would know (epoch, last `seq`, attempt). Each command can be
built without being run, so that a test gives it twice or changes one field.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import text

from perdure.contracts.calls import Opening, Owner, TurnRef
from perdure.contracts.canonical import canonical_json, content_digest
from perdure.contracts.events import (
    LedgerEvent,
    ModelAnswered,
    Observation,
    ToolCalled,
    answered_event_id,
    called_event_id,
)
from perdure.contracts.ids import derive_operation_id
from perdure.contracts.messages import Message, TextPart, ToolCallPart, user_message
from perdure.contracts.model import FinishReason, Usage
from perdure.contracts.safety import ReplaySafety
from perdure.contracts.tools import ResultReason, ResultStatus, ToolOutcome
from perdure.contracts.turn import TurnLimits, TurnResult, TurnStatus
from perdure.stores import Store
from perdure.stores.closing import not_executed_outcome
from perdure.stores.commands import (
    CloseCall,
    CommitAnswer,
    DispatchCall,
    DispatchReply,
    FinishTurn,
    PlannedCall,
    PrepareStep,
    ReportReconcile,
    SettleCall,
    StepState,
)
from perdure.stores.event_log import read_turn_events
from perdure.stores.ledger import commit_answer, end_turn
from perdure.stores.operations import close_call, dispatch_call, report_reconcile, settle_call
from perdure.stores.tables import METADATA
from perdure.stores.transcript import list_transcript
from perdure.stores.turns import prepare_step

SAFE, KEYED = ReplaySafety.SAFE, ReplaySafety.KEYED
RECONCILED, UNSAFE = ReplaySafety.RECONCILED, ReplaySafety.UNSAFE
# No holder is lost by its age within a test.
NEVER_LOST_MS = 3_600_000
# Every holder is.
LOST_AT_ONCE_MS = -1
COST = Usage(input_tokens=5, output_tokens=3, cached_tokens=1)

Said = tuple[str, ReplaySafety] | PlannedCall


def owner(name: str = "first") -> Owner:
    """Somebody who acts for a turn."""
    return Owner(temporal_namespace="default", workflow_id=f"turn/{name}", run_id=f"run-{name}")


def done(said: str = "done", **changes: Any) -> ToolOutcome:
    """The outcome of a tool that returned."""
    return ToolOutcome(status=ResultStatus.OK, text=said, **changes)


class TurnDriver:
    """One turn of one conversation and what its workflow knows of it."""

    def __init__(
        self,
        store: Store,
        request: str = "request-1",
        *,
        conversation: str = "talk",
        namespace: str = "default",
        message: str = "hello",
        acting: Owner | None = None,
        limits: TurnLimits | None = None,
    ) -> None:
        self.store = store
        self.key = {
            "namespace": namespace,
            "conversation_id": conversation,
            "request_id": request,
        }
        self.message = message
        self.owner = acting if acting is not None else owner()
        self.limits = limits if limits is not None else TurnLimits()
        self.epoch = 0
        self.seq = 0
        self.attempt = 0

    @property
    def turn_id(self) -> str:
        """The turn's derived id."""
        return TurnRef(**self.key).turn_id

    @property
    def ref(self) -> TurnRef:
        """What the workflow sends along."""
        known = self.store.store_id if self.epoch else ""
        return TurnRef(**self.key, epoch=self.epoch, store=known, seq=self.seq)

    def operation_id(self, index: int = 0, step: int = 1) -> str:
        """The derived id of a call."""
        return derive_operation_id(self.turn_id, step, index)

    def opening(self, **changes: Any) -> Opening:
        """What the first step opens the turn with, its digest filled in."""
        values = {
            "agent": "desk",
            "message": user_message(self.message),
            "limits": self.limits,
            "run_id": self.owner.run_id,
        }
        opening = Opening(**{**values, **changes})
        return opening.model_copy(update={"request_digest": opening.digest_for(self.ref)})

    def prepare_command(self, step: int = 1, **changes: Any) -> PrepareStep:
        """With an opening until the turn is known to be open."""
        values: dict[str, Any] = {
            "turn": self.ref,
            "step": step,
            "owner": None if self.epoch else self.owner,
            "opening": None if self.epoch else self.opening(),
            "model": "scripted",
            "parameters_json": "{}",
            "instructions": "Be careful.",
            "tools_json": "[]",
            "worker": "worker-1",
        }
        return PrepareStep(**{**values, **changes})

    def prepare(self, step: int = 1, **changes: Any) -> StepState:
        """Fix a step's request."""
        state = self.store.transact(prepare_step, self.prepare_command(step, **changes))
        self._learn(state)
        return state

    def answer_command(
        self,
        step: int = 1,
        said: str = "the answer",
        calls: Sequence[Said] = (),
        *,
        attempt: int | None = None,
        usage: Usage = COST,
    ) -> CommitAnswer:
        """An answer with calls; without any it is the final one."""
        planned = [self._planned(step, index, item) for index, item in enumerate(calls)]
        parts: list[Any] = [TextPart(text=said)] if said else []
        parts += [
            ToolCallPart(
                name=item.called.tool,
                call_id=item.called.operation_id,
                provider_call_id=item.called.provider_call_id,
                arguments=item.called.arguments,
            )
            for item in planned
        ]
        answered = ModelAnswered(
            id=answered_event_id(self.turn_id, step),
            **self._where,
            step=step,
            attempt=self.attempt if attempt is None else attempt,
            model="scripted",
            parts=tuple(parts),
            finish_reason=FinishReason.TOOL_CALLS if planned else FinishReason.STOP,
            usage=usage,
        )
        return CommitAnswer(turn=self.ref, answered=answered, calls=tuple(planned))

    def answer(
        self, step: int = 1, said: str = "the answer", calls: Sequence[Said] = ()
    ) -> StepState:
        """Commit an answer of the current attempt."""
        state = self.store.transact(commit_answer, self.answer_command(step, said, calls))
        self._learn(state)
        return state

    def called(
        self, step: int, index: int, tool: str, safety: ReplaySafety, **changes: Any
    ) -> ToolCalled:
        """The fact of a call."""
        operation_id = self.operation_id(index, step)
        arguments = changes.pop("arguments", {"number": index})
        values = {
            "id": called_event_id(operation_id),
            **self._where,
            "step": step,
            "index": index,
            "operation_id": operation_id,
            "tool": tool,
            "provider_call_id": "same-for-all",
            "arguments": arguments,
            "arguments_digest": content_digest(
                canonical_json({"arguments": arguments, "tool": tool})
            ),
            "safety": safety,
        }
        return ToolCalled(**{**values, **changes})

    def calling(self, *calls: Said) -> "TurnDriver":
        """Open the turn and commit a first answer with these calls."""
        self.prepare(1)
        self.answer(1, "", calls)
        return self

    def dispatch_command(
        self, token: str, safety: ReplaySafety, *, index: int = 0, step: int = 1, **changes: Any
    ) -> DispatchCall:
        """T1."""
        values: dict[str, Any] = {
            "turn": self.ref,
            "step": step,
            "index": index,
            "token": token,
            "safety": safety,
            "worker": "worker-1",
            "activity": f"run/{index}",
            "activity_attempt": 1,
            "holder_lost_ms": NEVER_LOST_MS,
        }
        return DispatchCall(**{**values, **changes})

    def dispatch(self, token: str, safety: ReplaySafety, **changes: Any) -> DispatchReply:
        """T1, run."""
        return self.store.transact(dispatch_call, self.dispatch_command(token, safety, **changes))

    def settle_command(
        self,
        token: str,
        outcome: ToolOutcome | None = None,
        *,
        index: int = 0,
        step: int = 1,
        generation: int = 1,
    ) -> SettleCall:
        """T2."""
        return SettleCall(
            turn=self.ref,
            operation_id=self.operation_id(index, step),
            token=token,
            generation=generation,
            outcome=outcome if outcome is not None else done(),
        )

    def settle(self, token: str, outcome: ToolOutcome | None = None, **place: int) -> int:
        """T2, run."""
        return self.store.transact(settle_call, self.settle_command(token, outcome, **place))

    def run_call(self, safety: ReplaySafety, said: str = "done", **place: int) -> None:
        """T1 and T2 of a call that nothing happens to."""
        token = f"token-{place.get('step', 1)}-{place.get('index', 0)}"
        self.dispatch(token, safety, **place)
        self.settle(token, done(said), **place)

    def close_command(
        self,
        reason: ResultReason,
        *,
        generation: int | None = None,
        index: int = 0,
        step: int = 1,
        holder_lost_ms: int = NEVER_LOST_MS,
    ) -> CloseCall:
        """Give a call a result without an outcome."""
        return CloseCall(
            turn=self.ref,
            step=step,
            index=index,
            outcome=not_executed_outcome(reason),
            generation=generation,
            holder_lost_ms=holder_lost_ms,
        )

    def close(self, reason: ResultReason, **changes: Any) -> DispatchReply:
        """Close a call, run."""
        return self.store.transact(close_call, self.close_command(reason, **changes))

    def reconcile_command(
        self, observation: Observation, *, generation: int = 1, outcome: ToolOutcome | None = None
    ) -> ReportReconcile:
        """What a reconcile function said."""
        return ReportReconcile(
            turn=self.ref,
            step=1,
            index=0,
            generation=generation,
            observation=observation,
            outcome=outcome,
        )

    def reconcile(self, observation: Observation, **changes: Any) -> DispatchReply:
        """Report it."""
        command = self.reconcile_command(observation, **changes)
        return self.store.transact(report_reconcile, command)

    def end_command(
        self, status: TurnStatus = TurnStatus.CANCELLED, reason: str = "cancelled", **changes: Any
    ) -> FinishTurn:
        """End the turn without an answer."""
        values: dict[str, Any] = {
            "turn": self.ref,
            "owner": self.owner,
            "status": status,
            "stop_reason": reason,
            "opening": None if self.epoch else self.opening(),
        }
        return FinishTurn(**{**values, **changes})

    def end(
        self, status: TurnStatus = TurnStatus.CANCELLED, reason: str = "cancelled", **changes: Any
    ) -> TurnResult | None:
        """End it, run."""
        return self.store.transact(end_turn, self.end_command(status, reason, **changes))

    def events(self) -> list[LedgerEvent]:
        """The turn's facts, their chain checked."""
        return [stored.event for stored in self.store.read(read_turn_events, self.turn_id)]

    def kinds(self) -> list[str]:
        """The kinds of the turn's facts, in order."""
        return [event.kind for event in self.events()]

    def transcript(self) -> list[Message]:
        """The whole conversation."""
        namespace, conversation = self.key["namespace"], self.key["conversation_id"]
        entries = self.store.read(list_transcript, namespace, conversation)
        return [entry.message for entry in entries]

    @property
    def _where(self) -> dict[str, str]:
        return {
            "namespace": self.key["namespace"],
            "conversation_id": self.key["conversation_id"],
            "turn_id": self.turn_id,
        }

    def _planned(self, step: int, index: int, item: Said) -> PlannedCall:
        if isinstance(item, PlannedCall):
            return item
        return PlannedCall(called=self.called(step, index, *item))

    def _learn(self, state: StepState) -> None:
        self.epoch = state.epoch or self.epoch
        self.seq = state.seq or self.seq
        self.attempt = state.attempt or self.attempt


def contents(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""

    def read(tx: Any) -> dict[str, list[tuple[Any, ...]]]:
        return {
            name: sorted(
                (tuple(row) for row in tx.execute(text(f"select * from {name}"))), key=repr
            )
            for name in METADATA.tables
        }

    return store.read(read)


@contextmanager
def unchanged(store: Store) -> Iterator[None]:
    """What happens inside writes nothing at all."""
    before = contents(store)
    yield
    assert contents(store) == before


def rows(store: Store, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """Read with SQL, as an operator would."""
    return store.read(lambda tx: [tuple(row) for row in tx.execute(text(statement), values)])


def damage(store: Store, statement: str, **values: Any) -> None:
    """Change the database behind the ledger's back; at least one row must be hit."""

    def break_it(tx: Any) -> None:
        assert tx.execute(text(statement), values).rowcount > 0

    store.transact(break_it)
