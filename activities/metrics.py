"""Our own Prometheus metrics (extra `metrics`), in a registry that belongs to one worker.

Labels come from declared names and closed lists only - never an id, a caller's text or a
provider's - so the number of series is bounded by the app. Loaded only when it is switched on.
"""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from perdure.activities.telemetry import ModelCall, Recovery, Work
from perdure.contracts import errors
from perdure.contracts.turn import StopReason
from perdure.stores.measured import EndedTurn

OTHER = "other"

_STORE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_TOOL_BUCKETS_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_MODEL_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600)


class Metrics:
    """An observer that counts."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, agents: Collection[str]) -> None:
        self._agents = frozenset(agents)
        self._codes = _error_codes()
        self._reasons = self._codes | {reason.value for reason in StopReason}
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._turns = Counter(
            "perdure_turns",
            "Turns that ended, as this worker saw it; the ledger has the exact number.",
            ("agent", "status", "stop_reason"),
            registry=registry,
        )
        self._recoveries = Counter(
            "perdure_recoveries", "What was recovered, by kind.", ("kind",), registry=registry
        )
        self._tokens = Counter(
            "perdure_model_tokens",
            "Tokens of all model calls, also of answers that came too late; cached ones are "
            "part of the input.",
            ("agent", "model", "direction"),
            registry=registry,
        )
        self._model_seconds = Histogram(
            "perdure_model_seconds",
            "Model calls, from the request to the whole answer; outcome is ok or an error code.",
            ("agent", "model", "outcome"),
            buckets=_MODEL_BUCKETS_S,
            registry=registry,
        )
        self._tool_seconds = Histogram(
            "perdure_tool_seconds",
            "Executions of tools; status is the result's, or how it ended without one.",
            ("tool", "safety", "status"),
            buckets=_TOOL_BUCKETS_S,
            registry=registry,
        )
        self._store_seconds = Histogram(
            "perdure_store_seconds",
            "Answers of the ledger's database, waiting for a thread included.",
            ("command",),
            buckets=_STORE_BUCKETS_S,
            registry=registry,
        )
        for kind in Recovery:
            # A rate needs a zero before the first one happens.
            self._recoveries.labels(kind.value)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format. Thread-safe."""
        return generate_latest(self._registry)

    def began(self, work: Work) -> None:
        """Nothing is counted before it has ended."""

    def ended(self, work: Work) -> None:
        """Count a model call or an execution of a tool."""
        if isinstance(work, ModelCall):
            self._count_model(work)
            return
        labels = (work.called.tool, work.safety.value, self._known(work.status))
        self._tool_seconds.labels(*labels).observe(work.seconds)

    def turn_ended(self, turn: EndedTurn) -> None:
        """Count a turn."""
        agent = turn.agent if turn.agent in self._agents else OTHER
        reason = turn.stop_reason if turn.stop_reason in self._reasons else OTHER
        self._turns.labels(agent, turn.status.value, reason).inc()

    def recovered(self, kind: Recovery, turn_id: str) -> None:
        """Count a recovery."""
        self._recoveries.labels(kind.value).inc()

    def store_answered(self, command: str, seconds: float) -> None:
        """Count a command of the ledger."""
        self._store_seconds.labels(command).observe(seconds)

    def close(self) -> None:
        """Nothing is left to hand over."""

    def _count_model(self, call: ModelCall) -> None:
        agent, model = call.request.agent, call.request.model
        outcome = self._known(call.error) if call.error else "ok"
        self._model_seconds.labels(agent, model, outcome).observe(call.seconds)
        if call.response is not None:
            usage = call.response.usage
            self._tokens.labels(agent, model, "input").inc(usage.input_tokens)
            self._tokens.labels(agent, model, "output").inc(usage.output_tokens)
            self._tokens.labels(agent, model, "cached").inc(usage.cached_tokens)

    def _known(self, word: str) -> str:
        return word if word in self._codes or word in _ENDS else OTHER


# Statuses of results, ends of executions, and what is no error of ours.
_ENDS = {
    *("ok", "error", "interrupted", "not_executed", "refused"),
    *("settled", "retry", "reconcile", "timed_out", "stopped", "cancelled", "internal_error"),
}


def _error_codes() -> frozenset[str]:
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    return frozenset(
        item.code for item in classes if issubclass(item, errors.PerdureError) and item.code
    )
