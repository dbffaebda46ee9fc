"""OpenTelemetry traces of turns (extra `otel`), by the GenAI semantic conventions.

A turn is one trace and its id is the turn's: retries, other workers and resets land in it and
nothing travels through Temporal. Spans are handed to a queue that drops what does not fit, so a
collector that is down or hangs costs spans and nothing else. Without `content` no span carries a
message, an argument, a result or an error's text. Loaded only when it is switched on.
"""

import logging
import os
import socket
from datetime import UTC, datetime
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from perdure.activities.telemetry import ModelCall, Recovery, Work
from perdure.activities.tracing_attributes import (
    ERROR_TYPE,
    RECOVERY,
    TURN_ID,
    attributes_of_model,
    attributes_of_response,
    attributes_of_result,
    attributes_of_tool,
    attributes_of_turn,
)
from perdure.contracts.canonical import digest_parts
from perdure.contracts.turn import TurnStatus
from perdure.stores.measured import EndedTurn

logger = logging.getLogger("perdure.activities")

_TRACER = "perdure"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NOT_AN_ERROR = ("ok", "settled", "retry", "reconcile", "stopped", "cancelled")


class _TurnIds(RandomIdGenerator):
    """Random ids, except for the one span that stands for a turn."""

    def __init__(self) -> None:
        self.next_turn: str | None = None

    def generate_trace_id(self) -> int:
        if self.next_turn is None:
            return super().generate_trace_id()
        return trace_id_of(self.next_turn)

    def generate_span_id(self) -> int:
        if self.next_turn is None:
            return super().generate_span_id()
        return turn_span_id_of(self.next_turn)


class Tracing:
    """An observer that makes spans. The endpoint, its headers and the sampler are OTEL_*'s."""

    def __init__(self, *, content: bool = False) -> None:
        protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "")
        if protocol not in ("", "http/protobuf"):
            logger.warning("traces are sent as http/protobuf; OTEL_EXPORTER_OTLP_PROTOCOL differs")
        self._content = content
        self._ids = _TurnIds()
        self._provider = TracerProvider(
            resource=_resource(), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(_TRACER)
        self._open: dict[Work, tuple[Span, Any]] = {}

    def began(self, work: Work) -> None:
        """Start a span and make it current, so that a tool's own spans lie under it."""
        if isinstance(work, ModelCall):
            name, turn_id = f"chat {work.request.model}", work.request.turn_id
            kind, attributes = SpanKind.CLIENT, attributes_of_model(work, self._content)
        else:
            name, turn_id = f"execute_tool {work.called.tool}", work.called.turn_id
            kind, attributes = SpanKind.INTERNAL, attributes_of_tool(work, self._content)
        parent = self._turn_context(turn_id)
        span = self._tracer.start_span(name, parent, kind, attributes)
        token = otel_context.attach(trace.set_span_in_context(span))
        self._open[work] = (span, token)

    def ended(self, work: Work) -> None:
        """End the span with what it came to."""
        span, token = self._open.pop(work)
        otel_context.detach(token)
        if isinstance(work, ModelCall):
            span.set_attributes(attributes_of_response(work, self._content))
            error = work.error
        else:
            span.set_attributes(attributes_of_result(work, self._content))
            error = work.status if work.status not in _NOT_AN_ERROR else ""
        _end(span, error)

    def turn_ended(self, turn: EndedTurn) -> None:
        """Make the span of the whole turn, the parent of all others, with the ledger's times."""
        self._ids.next_turn = turn.turn_id
        try:
            span = self._tracer.start_span(
                f"invoke_agent {turn.agent}",
                Context(),
                SpanKind.INTERNAL,
                attributes_of_turn(turn),
                start_time=_nanoseconds(turn.opened_at),
            )
        finally:
            self._ids.next_turn = None
        error = turn.stop_reason if turn.status is TurnStatus.FAILED else ""
        _end(span, error, _nanoseconds(turn.ended_at))

    def recovered(self, kind: Recovery, turn_id: str) -> None:
        """Mark the moment in the turn's trace."""
        name, attributes = f"recovery {kind.value}", {TURN_ID: turn_id, RECOVERY: kind.value}
        self._tracer.start_span(name, self._turn_context(turn_id), attributes=attributes).end()

    def store_answered(self, command: str, seconds: float) -> None:
        """Not traced: a span for each transaction would hide the turn."""

    def close(self) -> None:
        """Send what is queued; may take as long as the collector does."""
        self._provider.shutdown()

    def _turn_context(self, turn_id: str) -> Context:
        trace_id = trace_id_of(turn_id)
        # Every worker must come to the same decision, also about a parent that it never sees.
        sampled = self._provider.sampler.should_sample(Context(), trace_id, _TRACER)
        flag = TraceFlags.SAMPLED if sampled.decision.is_sampled() else TraceFlags.DEFAULT
        parent = SpanContext(
            trace_id, turn_span_id_of(turn_id), is_remote=True, trace_flags=TraceFlags(flag)
        )
        return trace.set_span_in_context(NonRecordingSpan(parent))


def trace_id_of(turn_id: str) -> int:
    """The trace's id: the hex digits of the turn's id."""
    return int(turn_id.removeprefix("turn_"), 16)


def turn_span_id_of(turn_id: str) -> int:
    """The id of the span that stands for the turn."""
    return int(digest_parts("perdure.turn-span.v1", (turn_id,))[:16], 16) or 1


def _resource() -> Resource:
    instance = f"{os.getpid()}@{socket.gethostname()}"
    resource = Resource.create({"service.instance.id": instance})
    named = str(resource.attributes.get(SERVICE_NAME, ""))
    if named.startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "perdure"}))
    return resource


def _end(span: Span, error: str, at_ns: int | None = None) -> None:
    if error:
        span.set_attribute(ERROR_TYPE, error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(at_ns)


def _nanoseconds(moment: datetime) -> int:
    # The ledger's times are UTC; SQLite gives them back without saying so.
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return int(aware.timestamp() * 1_000_000) * 1000
