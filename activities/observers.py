"""Which observers a worker has, by its settings; the only place that knows their extras.

A switch that was set for us and lacks its extra is a SetupError that names it. Off, nothing of
OpenTelemetry or Prometheus is imported.
"""

import importlib.util
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from perdure.activities.health import Exposition
from perdure.activities.telemetry import Observer
from perdure.contracts.errors import SetupError

logger = logging.getLogger("perdure.worker")

# Whoever sets these wants traces of everything on a machine, perhaps not knowing of us.
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_METRICS_LIBRARY: Final = "prometheus_client"
_TRACES_LIBRARIES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True)
class Wanted:
    """What is to be measured. `traces`: None where an endpoint in the environment decides."""

    metrics: bool = False
    traces: bool | None = None
    content: bool = False


def check_extras(wanted: Wanted) -> Wanted:
    """What can be measured here. Raises SetupError if a library is missing that was asked for.

    An endpoint that merely stands in the environment asks for nothing: then it is a warning.
    """
    if wanted.metrics and not _installed(_METRICS_LIBRARY):
        raise SetupError(_missing("PERDURE_METRICS_PORT", "metrics"))
    traces = wanted.traces
    if traces is None:
        traces = any(os.environ.get(name) for name in _ENDPOINTS)
    if traces and not all(_installed(name) for name in _TRACES_LIBRARIES):
        if wanted.traces:
            raise SetupError(_missing("PERDURE_OTEL", "otel"))
        logger.warning("%s: there are no traces", _missing(_ENDPOINTS[0], "otel"))
        traces = False
    return Wanted(metrics=wanted.metrics, traces=traces, content=wanted.content)


def make_observers(
    wanted: Wanted, agents: Collection[str]
) -> tuple[list[Observer], Exposition | None]:
    """The observers, and what `/metrics` answers. Raises SetupError for what cannot be set up."""
    observers: list[Observer] = []
    exposition = None
    if wanted.metrics:
        from perdure.activities.metrics import Metrics

        metrics = Metrics(agents)
        exposition = Exposition(metrics.exposition, metrics.content_type)
        observers.append(metrics)
    if wanted.traces:
        from perdure.activities.tracing import Tracing

        try:
            observers.append(Tracing(content=wanted.content))
        except Exception as error:  # The library's own settings are read by it, in its own way.
            raise SetupError(
                f"traces cannot be set up ({type(error).__name__}); look at the OTEL_* variables"
            ) from None
    return observers, exposition


def _installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except (ModuleNotFoundError, ValueError):
        # A part of its name is missing, or it was taken out of this process.
        return False


def _missing(variable: str, extra: str) -> str:
    return f"{variable} is set and its libraries are missing; pip install 'perdure[{extra}]'"
