"""/v2 through a real socket: the same answers as over gRPC, and every refusal with its status, sentence and count."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.config import ServeConfig
from beamline.serving.lifecycle import Phase
from beamline.serving.security.access import Scope
from beamline.serving.security.tokens import new_token
from beamline.serving.server import Server
from tests.serving.api.http.gateway import gateway
from tests.serving.api.open_inference.test_infer import SERVICE, infer, raw_texts, text_request
from tests.serving.disk import write_version
from tests.serving.doubles import EngineDouble, EngineDoubles, eventually, started

INFER = "/v2/models/fake/infer"
LABEL = "POST /v2/models/{name}/infer"
TEXTS = ["Größe 😀", "b"]
ONE = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": TEXTS}]}


def with_tail(request: dict[str, Any], tail: bytes) -> dict[str, Any]:
    head = json.dumps(request).encode()
    return {"content": head + tail, "headers": {"inference-header-content-length": str(len(head))}}


async def ask(server: Server, method: str, request: Message, kind: type[Message]) -> Any:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            f"{SERVICE}/{method}", type(request).SerializeToString, response_deserializer=kind.FromString
        )
        return await call(request, timeout=60)


async def test_an_inference_is_answered_as_over_grpc() -> None:
    raw = raw_texts(*TEXTS)
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True, "num_hypotheses": 2}}
    async with gateway(load_reports=True) as (server, client):
        expected = await infer(server, text_request(*TEXTS, num_hypotheses=2))
        plain = await client.post(INFER, json={**ONE, "id": "7", "parameters": {"num_hypotheses": 2}})
        binary = await client.post("/v2/models/fake/versions/1/infer", **with_tail(asked, raw))
        ids = {"name": "token_ids", "shape": [2], "datatype": "INT64", "data": [5, 6]}
        chosen = await client.post(INFER, json={"inputs": [ids], "outputs": [{"name": "token_ids"}]})
        calls = server.metrics.registry.get_sample_value
        await eventually(lambda: calls("beamline_calls_total", {"method": LABEL, "code": "OK"}) == 3)
    found = plain.json()
    assert (plain.status_code, found["id"], found["model_name"], found["model_version"]) == (200, "7", "fake", "1")
    text, score = expected.outputs
    assert found["outputs"] == [
        {
            "name": "text",
            "datatype": "BYTES",
            "shape": [2, 2],
            "data": [each.decode() for each in text.contents.bytes_contents],
        },
        {"name": "score", "datatype": "FP32", "shape": [2, 2], "data": list(score.contents.fp32_contents)},
    ]
    assert "endpoint-load-metrics" in plain.headers
    assert binary.headers["content-type"] == "application/octet-stream"
    length = int(binary.headers["inference-header-content-length"])
    first, second = json.loads(binary.content[:length])["outputs"]
    size = first["parameters"]["binary_data_size"]
    tail = binary.content[length:]
    assert tail[:size] == raw_texts(*(each.decode() for each in text.contents.bytes_contents))
    scores = np.frombuffer(tail[size:], "<f4").tolist()
    assert (scores, second["parameters"]["binary_data_size"]) == (list(score.contents.fp32_contents), 16)
    (output,) = chosen.json()["outputs"]
    assert (output["name"], output["datatype"], output["data"]) == ("token_ids", "INT64", [5, 6])


async def test_descriptions_are_those_of_grpc() -> None:
    pairs: list[tuple[str, str, Message, type[Message]]] = [
        ("/v2", "ServerMetadata", oip.ServerMetadataRequest(), oip.ServerMetadataResponse),
        ("/v2/models/fake", "ModelMetadata", oip.ModelMetadataRequest(name="fake"), oip.ModelMetadataResponse),
        ("/v2/models/fake/stats", "ModelStatistics", oip.ModelStatisticsRequest(), oip.ModelStatisticsResponse),
        ("/v2/models/stats", "ModelStatistics", oip.ModelStatisticsRequest(), oip.ModelStatisticsResponse),
    ]
    async with gateway() as (server, client):
        for path, method, request, kind in pairs:
            found = await client.get(path)
            assert json_format.ParseDict(found.json(), kind()) == await ask(server, method, request, kind), path
            assert found.json() == (await client.get(path.replace("fake", "fake/versions/1"))).json()
        config = await ask(server, "ModelConfig", oip.ModelConfigRequest(name="fake"), oip.ModelConfigResponse)
        found = await client.get("/v2/models/fake/config")
        assert json_format.ParseDict(found.json(), oip.ModelConfig()) == config.config
        ready = await client.get("/v2/models/fake/ready")
        assert (ready.status_code, ready.json()) == (200, {"name": "fake", "ready": True})
        index = await client.post("/v2/repository/index")
        assert index.json() == [{"name": "fake", "version": "1", "state": "READY", "reason": ""}]
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        assert (await client.get("/v2/health/ready")).json() == {"ready": True}
        server.lifecycle.phase = Phase.LEAVING
        leaving = await client.get("/v2/health/ready")
        assert (leaving.status_code, leaving.json()) == (503, {"ready": False, "error": "leaving"})
        assert (await client.get("/v2/models/fake/ready")).status_code == 503
        assert (await client.get("/v2/health/live")).status_code == 200


async def test_what_is_refused_has_its_status_and_sentence_and_is_counted() -> None:
    wrong = {"inputs": [{"name": "text", "shape": [3], "datatype": "BYTES", "data": ["a", "b"]}]}
    vectors = {"inputs": [{"name": "text", "shape": [1], "datatype": "FP32", "data": [1.5]}]}
    region = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"shared_memory_region": "a"}}
    outputs = [{"name": "text", "parameters": {"classification": 2}}]
    length = {"inference-header-content-length": "-1"}
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        (INFER, {"json": wrong}, 400, "2 BYTES elements, but shape [3] needs 3"),
        (INFER, {"json": vectors}, 400, "has datatype 'FP32'; it must be BYTES"),
        (INFER, {"json": {"inputs": [region]}}, 400, "lies in shared memory"),
        (INFER, {"json": {**ONE, "outputs": outputs}}, 400, "this server knows none for outputs"),
        (INFER, {"json": {**ONE, "parameters": {"beams": 2}}}, 400, "parameter 'beams' is not known"),
        (INFER, {"json": {**ONE, "parameters": {"beam_size": 99}}}, 400, "beam_size is 99"),
        (INFER, {"content": b"{"}, 400, "the body is not JSON"),
        (INFER, {"json": ONE, "headers": length}, 400, "inference-header-content-length is '-1'"),
        (INFER, {"json": ONE, "headers": {"x-beamline-timeout-ms": "x"}}, 400, "x-beamline-timeout-ms is 'x'"),
        (INFER, {"content": b"<a/>", "headers": {"content-type": "text/xml"}}, 415, "or application/octet-stream"),
        (INFER, {"content": gzip.compress(b"{}"), "headers": {"content-encoding": "gzip"}}, 415, "without compression"),
        (INFER, {"json": {**ONE, "id": "a" * 70_000}}, 413, "larger than 65536 bytes"),
        ("/v2/models/none/infer", {"json": ONE}, 404, "there is no model 'none' here; there is fake"),
        ("/v2/models/fake/versions/9/infer", {"json": ONE}, 404, "has no version '9' here; there is 1"),
        ("/v2/repository/models/none/load", {}, 404, "the repository has no model 'none'"),
        ("/v2/repository/models/fake/load", {"json": {"parameters": {"a": 1}}}, 400, "parameter 'a' is not known"),
        ("/v2/repository/index", {"content": b"[]"}, 400, "it must be an object"),
        ("/v2/nothing", {}, 404, "there is nothing at /v2/nothing"),
        ("/v2/models/fake/ready", {}, 405, "knows no POST; it knows"),
    ]
    async with gateway(max_message_bytes=2**16) as (server, client):
        for path, sent, status, sentence in cases:
            answer = await client.post(path, **sent)
            assert answer.status_code == status, (path, sent, answer.text)
            assert sentence in answer.json()["error"], answer.text
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
        answer = await client.get("/v2/models/none/ready")
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
        refused = server.metrics.registry.get_sample_value
        counted = {reason: refused("beamline_refused_total", {"reason": reason}) for reason in ("invalid", "too_large")}
        assert counted == {"invalid": 13, "too_large": 1}
        assert refused("beamline_refused_total", {"reason": "model_not_found"}) == 4
        assert refused("beamline_calls_total", {"method": LABEL, "code": "NOT_FOUND"}) == 2
        page = await client.post(INFER, content=json.dumps(ONE), headers={"origin": "http://elsewhere"})
        assert page.status_code == 415  # from a web page, JSON must say that it is


async def test_a_body_that_does_not_come_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beamline.serving.api.http.body._BODY_SECONDS", 0.01)
    async with gateway() as (server, _):
        host, _, port = str(server.http_address).rpartition(":")
        for path in (INFER, "/v1/repository/fake/load"):  # which have one reader
            reader, writer = await asyncio.open_connection(host, int(port))
            head = "host: a\r\ncontent-type: application/json\r\ncontent-length: 9"
            writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n{{".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()
        assert server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "too_slow"}) == 2


async def test_headers_and_parameters_reach_the_engine_and_who_goes_is_not_decoded_for() -> None:
    engine = EngineDouble(held=True)
    async with gateway(engine) as (server, client):
        headers = {"x-beamline-priority": "3", "x-beamline-timeout-ms": "60000"}
        one = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
        asking = asyncio.ensure_future(client.post(INFER, json=one, headers=headers))
        urgent = asyncio.ensure_future(client.post(INFER, json={**one, "parameters": {"priority": 1}}, headers=headers))
        await engine.until(lambda: len(engine.submitted) == 2)
        assert sorted(each.priority for each in engine.submitted) == [0, 3]
        assert all(each.deadline is not None for each in engine.submitted)
        for task in (asking, urgent):
            task.cancel()
        await engine.until(lambda: len(engine.cancelled) == 2)
        calls = server.metrics.registry.get_sample_value
        await eventually(lambda: calls("beamline_calls_total", {"method": LABEL, "code": "CANCELLED"}) == 2)
        engine.release()


async def test_tokens_are_those_of_grpc(tmp_path: Path) -> None:
    reader, one = new_token("reader", (Scope.INFER,), None)
    operator, other = new_token("operator", (Scope.INFER, Scope.ADMIN), None)
    (tmp_path / "tokens.toml").write_text(f"{one}\n{other}\n")
    async with gateway(tokens=tmp_path / "tokens.toml") as (_, client):
        for token, wanted, changing in ((None, 401, 401), (reader, 200, 403), (operator, 200, 404)):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            for path in ("/v2", "/v2/models/fake", "/v2/models/fake/ready", "/v2/models/stats"):
                assert (await client.get(path, headers=headers)).status_code == wanted, path
            for path, body in ((INFER, ONE), ("/v2/repository/index", {})):
                assert (await client.post(path, json=body, headers=headers)).status_code == wanted, path
            for change in ("load", "unload"):
                answer = await client.post(f"/v2/repository/models/none/{change}", json={}, headers=headers)
                assert answer.status_code == changing, answer.text
                assert isinstance(answer.json()["error"], str)
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await client.get(path)).status_code == 200


async def test_models_are_loaded_and_unloaded(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "de", 2)
    config = ServeConfig(repository=tmp_path, grpc_port=0, metrics_port=0, http_port=0)
    async with (
        started(Server(config, EngineDoubles().makers)) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):

        async def change(how: str, **parameters: Any) -> int:
            path = f"/v2/repository/models/de/{how}"
            return (await client.post(path, json={"parameters": parameters})).status_code

        async def ready(version: int) -> int:
            return (await client.get(f"/v2/models/de/versions/{version}/ready")).status_code

        both = {"version_policy": {"specific": {"versions": [1, 2]}}}
        assert [await ready(1), await ready(2)] == [404, 200]
        assert await change("load", config=json.dumps(both)) == 200
        assert [await ready(1), await ready(2)] == [200, 200]
        assert (await client.get("/v2/models/de")).json()["versions"] == ["1", "2"]
        assert len((await client.get("/v2/models/de/stats")).json()["model_stats"]) == 2
        assert await change("unload", unload_dependents=False) == 200
        gone = await client.post("/v2/models/de/infer", json=ONE)
        assert (gone.status_code, "is not served now" in gone.json()["error"]) == (503, True)
        assert (await client.post("/v2/repository/index", json={"ready": True})).json() == []
        assert (await client.get("/v2/health/ready")).json() == {"ready": False, "error": "no model is served"}
