"""Traces, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from beamline.protos import beamline_pb2 as pb
from beamline.serving.telemetry.tracing import ENDPOINTS, Tracing, tracing_of
from tests.serving.doubles import EngineDouble, connected, running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self.requests.append(request)
        return wire.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    monkeypatch.setenv(ENDPOINTS[0], f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield found
    server.stop(0)


async def test_a_call_and_its_parts_are_spans_of_the_callers_trace(collector: Collector) -> None:
    async with running(EngineDouble()) as server, connected(server) as stub:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine"))
        await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a"), pb.Input(text="b")]), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Translate(pb.TranslateRequest())
    by_name: dict[str, list[Any]] = {}
    for span in collector.spans():
        by_name.setdefault(span.name, []).append(span)
    good, bad = by_name.pop("beamline.v1.Inference/Translate")
    assert good.trace_id.hex() == TRACE
    assert good.parent_span_id.hex() == PARENT
    attributes = {one.key: one.value.string_value for one in good.attributes}
    assert attributes["rpc.system.name"] == "grpc"
    assert attributes["rpc.method"] == "beamline.v1.Inference/Translate"
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["gen_ai.request.model"] == "fake"
    assert attributes["beamline.request_id"] == "mine"
    assert {name: len(spans) for name, spans in by_name.items()} == {"queue": 2, "encode": 2, "decode": 2}
    assert all(span.parent_span_id == good.span_id for spans in by_name.values() for span in spans)
    decode = by_name["decode"][0]
    assert decode.end_time_unix_nano - decode.start_time_unix_nano == pytest.approx(3_000_000, rel=0.01)
    assert bad.trace_id.hex() != TRACE
    assert bad.status.message == "INVALID_ARGUMENT"
    resource = {one.key: one.value.string_value for one in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "beamline"


async def test_a_span_of_http_has_the_attributes_of_http(collector: Collector) -> None:
    async with running(EngineDouble(), http_port=0) as server, httpx.AsyncClient() as client:
        url = f"http://{server.http_address}/v1/translate"
        await client.post(url, json={"inputs": [{"text": "a"}]})
        await client.post(url, json={"inputs": []})
    good, bad = (span for span in collector.spans() if span.name == "POST /v1/translate")
    for span, code in ((good, 200), (bad, 400)):
        found = {one.key: one.value.string_value or one.value.int_value for one in span.attributes}
        assert found["http.request.method"] == "POST"
        assert found["http.route"] == found["url.path"] == "/v1/translate"
        assert found["http.response.status_code"] == code
        assert found["gen_ai.request.model"] == "fake"
        assert not [name for name in found if name.startswith("rpc.")]
        assert span.status.code == 0  # the client's mistake is no error of the server
    assert found["error.type"] == "INVALID_ARGUMENT"


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert type(tracing_of({})) is Tracing
