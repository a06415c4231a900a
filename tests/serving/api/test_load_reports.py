"""Load reports as clients and balancers receive them: behind every kind of call that asked a model, and no other."""

from __future__ import annotations

import base64

import grpc
import httpx2 as httpx
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from beamline.protos import beamline_pb2 as pb
from beamline.protos import orca_pb2
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, running
from tests.support.wire import trailers_of

REQUEST = pb.TranslateRequest(inputs=[pb.Input(text="a")])
TRANSLATE = "/beamline.v1.Inference/Translate"
TRAILER = "endpoint-load-metrics-bin"
HEADER = "endpoint-load-metrics"


async def report(
    server: Server, request: Message = REQUEST, method: str = TRANSLATE, code: grpc.StatusCode = grpc.StatusCode.OK
) -> orca_pb2.LoadReport | None:
    trailers = await trailers_of(server.grpc_address, method, request.SerializeToString())
    assert trailers["grpc-status"] == str(code.value[0]).encode()
    assert method.startswith("/grpc.") or trailers["x-request-id"]
    found = trailers.get(TRAILER)
    return None if found is None else orca_pb2.LoadReport.FromString(base64.b64decode(found + b"=="))


async def test_over_grpc() -> None:
    async with running(EngineDouble(), load_reports=True) as server:
        for number in range(5):
            found = await report(server)
            assert found is not None
            assert (found.rps_fractional > 0) == (number > 0)  # of calls before this one
            assert found.eps == 0
        assert await report(server, method="/beamline.v1.Inference/TranslateStream") is not None
        health = "/grpc.health.v1.Health/Check"
        assert await report(server, health_pb2.HealthCheckRequest(), health) is None
        unknown = pb.TranslateRequest(model="nobody", inputs=REQUEST.inputs)
        assert await report(server, unknown, code=grpc.StatusCode.NOT_FOUND) is None


async def test_a_refusal_for_its_load_is_an_error_of_the_server_and_a_wrong_value_is_not() -> None:
    wrong = pb.TranslateRequest(inputs=REQUEST.inputs, options=pb.DecodingOptions(beam_size=1000))
    async with running(EngineDouble(capacity=0), load_reports=True) as server:
        errors = []
        for request, code in (
            (wrong, grpc.StatusCode.INVALID_ARGUMENT),
            (wrong, grpc.StatusCode.INVALID_ARGUMENT),
            (REQUEST, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (REQUEST, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            found = await report(server, request, code=code)
            assert found is not None
            errors.append(found.eps)
    assert errors[:3] == [0, 0, 0]
    assert errors[3] > 0


async def test_over_http() -> None:
    engine = EngineDouble()
    async with (
        running(engine, http_port=0, load_reports=True) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        body = {"inputs": [{"text": "a"}]}
        answer = await client.post("/v1/translate", json=body)
        assert answer.headers[HEADER].startswith("TEXT application_utilization=")
        streamed = await client.post("/v1/translate", json=body, headers={"accept": "text/event-stream"})
        assert HEADER in streamed.headers
        engine.capacity = 0
        refused = await client.post("/v1/translate", json=body)
        assert (refused.status_code, HEADER in refused.headers) == (429, True)
        for path in ("/v1/models", "/healthz"):
            assert HEADER not in (await client.get(path)).headers


async def test_nobody_is_told_anything_unless_it_is_asked_for() -> None:
    async with (
        running(EngineDouble(), http_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        assert await report(server) is None
        assert HEADER not in (await client.post("/v1/translate", json={"inputs": [{"text": "a"}]})).headers
