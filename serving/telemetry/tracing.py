"""OpenTelemetry traces, if OTEL_EXPORTER_OTLP_ENDPOINT is set; otherwise OpenTelemetry is not even imported.

A call is a span, in the client's trace if it sends `traceparent`, with the attributes of OpenTelemetry's semantic
conventions for RPC or HTTP, and the model's name. Its children are the times that its sequences spent
in queue, encoder and decoder. Everything else (service name, headers, sampling) is set by OpenTelemetry's own
environment variables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from beamline.serving.contract.call import Sequences
from beamline.serving.errors import BeamlineError
from beamline.version import beamline_version, install_hint

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_MAX_SEQUENCES = 16  # of one call that have spans; a long document has thousands of sentences


class Tracing:
    """Does nothing: for servers without an endpoint for traces."""

    def call(self, method: str, headers: Mapping[str, str]) -> Any:
        return None

    def finish(self, span: Any, code: str, request_id: str, model: str | None, http_code: int | None) -> None:
        pass

    def sequences(self, span: Any, finished: Sequences) -> None:
        pass

    def close(self) -> None:
        pass


class OpenTelemetry(Tracing):
    def __init__(self, tracer_provider: Any, propagator: Any, trace: Any) -> None:
        self._provider = tracer_provider
        self._tracer = tracer_provider.get_tracer("beamline", beamline_version())
        self._propagator = propagator
        self._trace = trace

    def call(self, method: str, headers: Mapping[str, str]) -> Any:
        parent = self._propagator.extract(dict(headers))
        verb, _, path = method.partition(" ")
        name = method.removeprefix("/")
        attributes = (
            {"http.request.method": verb, "http.route": path, "url.path": path}
            if path
            else {"rpc.system.name": "grpc", "rpc.method": name}
        )
        return self._tracer.start_span(name, parent, self._trace.SpanKind.SERVER, attributes)

    def finish(self, span: Any, code: str, request_id: str, model: str | None, http_code: int | None) -> None:
        span.set_attribute("beamline.request_id", request_id)
        if http_code is None:
            span.set_attribute("rpc.response.status_code", code)
        else:
            span.set_attribute("http.response.status_code", http_code)
        if model is not None:
            span.set_attribute("gen_ai.request.model", model)
        if code != "OK":
            span.set_attribute("error.type", code)
        # By the conventions, what the client did wrong is no error of an HTTP server.
        if code != "OK" and (http_code is None or http_code >= 500):
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code))
        span.end()

    def sequences(self, span: Any, finished: Sequences) -> None:
        parent = self._trace.set_span_in_context(span)
        offset = time.time() - time.monotonic()
        for ended, queue, encode, decode in finished[:_MAX_SEQUENCES]:
            moment = ended + offset - queue - encode - decode
            for name, seconds in (("queue", queue), ("encode", encode), ("decode", decode)):
                part = self._tracer.start_span(name, parent, start_time=int(1e9 * moment))
                moment += seconds
                part.end(int(1e9 * moment))

    def close(self) -> None:
        """Sends the spans that were not sent yet."""
        self._provider.shutdown()


def tracing_of(environment: Mapping[str, str] = os.environ) -> Tracing:
    if not any(environment.get(name) for name in ENDPOINTS):
        return Tracing()
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise BeamlineError(
            f"{ENDPOINTS[0]} is set, but traces need {error.name}: {install_hint('tracing')}, or unset it"
        ) from error
    named = environment.get("OTEL_SERVICE_NAME")
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: "beamline"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetry(provider, TraceContextTextMapPropagator(), trace)
