"""An OTLP collector on loopback that keeps what it is sent, or takes it and never answers."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`with Collector() as collector:`; with `hanging`, no request is answered until the end."""

    def __init__(self, *, hanging: bool = False) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.services: set[str] = set()
        self._hanging = hanging
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False

    @property
    def url(self) -> str:
        """Its address, for `OTEL_EXPORTER_OTLP_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def named(self, name: str) -> list[Span]:
        """The spans of that name."""
        return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        """Keep the spans of one request."""
        self.bodies.append(body)
        if self._hanging:
            self._ended.wait()
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(values_of(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def values_of(carrier: Any) -> dict[str, Any]:
    """The attributes of a span or a resource as plain values."""
    return {item.key: _plain(item.value) for item in carrier.attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind or "string_value")
