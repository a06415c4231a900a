"""The JSON gateway through a real socket."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
import trustme

from beamline.protos import beamline_pb2 as pb
from beamline.serving.api.http.endpoints import ENDPOINTS
from beamline.serving.api.http.json_messages import from_json
from beamline.serving.api.http.openapi import openapi
from beamline.serving.api.inference import METHODS
from beamline.serving.config import ServeConfig
from beamline.serving.engine.request import Request
from beamline.serving.errors import InvalidRequest, Overloaded
from beamline.serving.lifecycle import Phase
from beamline.serving.models.loader import Observe
from beamline.serving.security.access import Scope
from beamline.serving.security.tls import TlsFiles
from beamline.serving.security.tokens import new_token
from beamline.serving.server import Server
from beamline.serving.telemetry.triton_metrics import Triton
from tests.serving.api.http.gateway import ONE, gateway
from tests.serving.doubles import EngineDouble, eventually, makers, running, started


async def test_translate_in_json() -> None:
    async with gateway() as (server, client):
        answer = await client.post(
            "/v1/translate",
            json={
                "inputs": [{"text": "Größe"}, {"token_ids": {"ids": [5]}}],
                "options": {"beamSize": 2, "num_hypotheses": 2},
            },
            headers={"x-request-id": "mine"},
        )
        sample, call = server.metrics.registry.get_sample_value, {"method": "POST /v1/translate", "code": "OK"}
        await eventually(lambda: sample("beamline_calls_total", call) == 1)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    found = answer.json()
    assert [len(one["hypotheses"]) for one in found["translations"]] == [2, 2]
    assert found["translations"][0]["hypotheses"][0]["text"] == "Größe"
    assert found["translations"][0]["source_tokens"] == 8


WRONG_BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"[]", "JSON"),
    (b"{", "JSON"),
    (b"\xff", "UTF-8"),
    (b'{"input": []}', "input"),
    (b'{"inputs": [{"text": 3}]}', "text"),
    (b'{"options": {"beam_size": -1}}', "beam_size"),
    (b'{"options": {"beam_size": 1e30}}', "beam_size"),
    (b'{"inputs":' + b"[" * 5000 + b"]" * 5000 + b"}", "JSON"),
    (json.dumps({"inputs": []}).encode(), "inputs is empty"),
    (json.dumps({"inputs": [{"text": "\ud800"}]}).encode(), ""),
]


async def test_a_body_that_is_wrong_is_answered_with_a_sentence() -> None:
    async with gateway() as (_, client):
        for body, sentence in WRONG_BODIES:
            answer = await client.post("/v1/translate", content=body)
            assert answer.status_code == 400, body[:50]
            error = answer.json()["error"]
            assert error["code"] == "INVALID_ARGUMENT"
            assert sentence in error["message"]
            assert "Traceback" not in error["message"]
        assert (await client.post("/v1/translate", json=ONE)).status_code == 200


SENTENCES = {
    '{"input": []}': "there is no field 'input'; known are model, version, inputs, source_language, target_language, "
    "options",
    '{"inputs": [{"text": "a"}, {"txt": "a"}]}': "there is no field 'txt' in inputs[1]; known are text, token_ids, ",
    '{"options": {"a": 1, "beamSize": 2, "b": 1}}': "there is no field 'a', 'b' in options; known are beam_size, ",
    '{"inputs": {"text": "a"}}': "inputs must be a list",
    '{"inputs": ["a"]}': "inputs[0] must be an object",
    '{"options": {"beamSize": -1}}': "options.beamSize is -1; it must be a whole number from 0 to ",
    '{"options": {"beam_size": "x"}}': 'options.beam_size is "x"; it must be a whole number from 0 to ',
    '{"options": {"length_penalty": "x"}}': 'options.length_penalty is "x"; it must be a number ',
    '{"options": {"split_sentences": "yes"}}': 'options.split_sentences is "yes"; it must be true or false',
    '{"options": {"early_stopping": "maybe"}}': 'options.early_stopping is "maybe"; it must be one of EARLY_',
    '{"options": {"early_stopping": 1.5}}': "options.early_stopping is 1.5; it must be one of EARLY_",
    '{"options": {"earlyStopping": 1e400}}': "options.earlyStopping is Infinity; it must be one of EARLY_",
    '{"options": {"early_stopping": 99999999999}}': "options.early_stopping is 99999999999; it must be one of EARLY_",
    f'{{"options": {{"beam_size": 1{"0" * 400}}}}}': "options.beam_size is 1000",
    f'{{"options": {{"length_penalty": -1{"0" * 309}}}}}': "options.length_penalty is -1000",
    f'{{"options": {{"early_stopping": 1{"0" * 400}}}}}': "options.early_stopping is 1000",
    f'{{"inputs": [{{"features": {{"values": [1{"0" * 400}]}}}}]}}': "inputs[0].features.values[0] is 1000",
    f'{{"options": {{"beam_size": {"1" * 5000}}}}}': "it has a number of too many digits",
    '{"model": "a", "model": "b"}': "it has 'model' twice in one object",
    '{"inputs": [{"text": 3}]}': "inputs[0].text is 3; it must be text, in quotes",
    '{"inputs": [{"text": "\\ud800"}]}': r'inputs[0].text is "\ud800"; it must be text, in quotes, of whole characters',
    '{"inputs": [{"text": "a", "token_ids": {}}]}': "inputs[0] has text and token_ids: give one of them",
    '{"inputs": ' + 3000 * "[": "it is nested too deeply",
    '{"options": ': "Expecting value: line 1",
    "not json": "Expecting value: line 1",
    "[]": "it must be an object, { ... }",
}


@pytest.mark.parametrize("body", SENTENCES)
def test_a_wrong_field_is_named_as_the_caller_wrote_it(body: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_json(body.encode(), pb.TranslateRequest)
    said = str(caught.value)
    assert said.startswith(f"the body is not a TranslateRequest in JSON: {SENTENCES[body]}")
    assert "\n" not in said
    assert not said.endswith(".")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("true", pb.EARLY_STOPPING_TRUE),
        ("false", pb.EARLY_STOPPING_FALSE),
        ('"never"', pb.EARLY_STOPPING_NEVER),
        ('"EARLY_STOPPING_TRUE"', pb.EARLY_STOPPING_TRUE),
        ("1", pb.EARLY_STOPPING_FALSE),
        ("2.0", pb.EARLY_STOPPING_TRUE),
    ],
)
@pytest.mark.parametrize("field", ["early_stopping", "earlyStopping"])
@pytest.mark.parametrize("kind", [pb.TranslateRequest, pb.GenerateRequest])
def test_early_stopping_has_hugging_faces_words_too(
    kind: type[pb.TranslateRequest | pb.GenerateRequest], field: str, written: str, meant: int
) -> None:
    read = from_json(f'{{"options": {{"{field}": {written}}}}}'.encode(), kind)
    assert isinstance(read, kind)
    assert read.options.early_stopping == meant


def test_early_stopping_that_is_null_is_left_out() -> None:
    read = from_json(b'{"options": {"early_stopping": null}}', pb.TranslateRequest)
    assert read == pb.TranslateRequest(options=pb.DecodingOptions())


@pytest.mark.parametrize("written", ["true", "false", "1.5", '"never"'])
def test_pooling_is_a_name_or_its_number(written: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"pooling is {written}; it must be one of POOLING_[A-Z_, ]+$"):
        from_json(f'{{"pooling": {written}}}'.encode(), pb.EmbedRequest)
    assert from_json(b'{"pooling": 2}', pb.EmbedRequest) == pb.EmbedRequest(pooling=pb.POOLING_MEAN)


async def test_what_is_at_no_address_is_an_error_as_all_others() -> None:
    async with gateway() as (_, client):
        nothing = await client.get("/v1/nothing", headers={"x-request-id": "mine"})
        wrong = await client.get("/v1/translate")
    assert nothing.status_code == 404
    sentence = "there is nothing at /v1/nothing; /docs says what there is"
    assert nothing.json() == {"error": {"code": "NOT_FOUND", "message": sentence, "request_id": "mine"}}
    assert nothing.headers["x-request-id"] == "mine"
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "UNIMPLEMENTED"
    assert wrong.json()["error"]["message"] == "/v1/translate knows no GET; it knows POST"


async def test_errors_have_their_own_status() -> None:
    def full(request: Request) -> Exception:
        return Overloaded("full", retry_after=1.5)

    def broken(request: Request) -> Exception:
        return RuntimeError("the secret of the house")

    async with gateway() as (_, client):
        assert (await client.post("/v1/translate", json={**ONE, "model": "nope"})).status_code == 404
        assert (await client.get("/v1/translate")).status_code == 405
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/v1/translate", json=ONE, headers={"x-beamline-priority": "9"})).status_code == 400
        assert (await client.post("/v1/translate", json=ONE, headers={"x-beamline-timeout-ms": "x"})).status_code == 400
    async with gateway(EngineDouble(answer=full)) as (_, client):
        answer = await client.post("/v1/translate", json=ONE)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    async with gateway(EngineDouble(answer=broken)) as (_, client):
        answer = await client.post("/v1/translate", json=ONE)
        assert answer.status_code == 500
        assert "secret" not in answer.text
    async with gateway(max_message_bytes=1000) as (server, client):
        assert (await client.post("/v1/translate", content=b" " * 1001)).status_code == 413
        sample = server.metrics.registry.get_sample_value
        assert sample("beamline_refused_total", {"reason": "too_large"}) == 1


BODY = json.dumps(ONE)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "application/json; charset=utf-8", "origin": "https://else.where"}, 200),  # asked before
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=a"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "https://else.where"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "null"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "cross-site"}, 415),
        ({"origin": "https://else.where"}, 415),
    ],
)
async def test_what_a_page_of_another_server_can_send_unasked_is_not_taken(headers: dict[str, str], code: int) -> None:
    async with gateway() as (server, client):
        answer = await client.post("/v1/translate", content=BODY, headers=headers)
        refused = server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "invalid"})
    assert answer.status_code == code, answer.text
    if code == 415:
        assert answer.json()["error"]["message"].endswith("it must be application/json")
        assert refused == 1


async def test_a_server_that_leaves_closes_connections_behind_answers() -> None:
    async with gateway() as (server, client):
        assert "connection" not in (await client.post("/v1/translate", json=ONE)).headers
        server.lifecycle.phase = Phase.LEAVING
        answer = await client.post("/v1/translate", json=ONE)
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def test_headers_reach_the_engine() -> None:
    engine = EngineDouble()
    async with gateway(engine) as (_, client):
        headers = {"x-beamline-priority": "3", "x-beamline-queue-timeout-ms": "50000", "x-beamline-timeout-ms": "60000"}
        await client.post("/v1/translate", json=ONE, headers=headers)
    (request,) = engine.submitted
    assert request.priority == 3
    assert request.queue_deadline is not None
    assert request.deadline is not None
    assert 5 < request.deadline - request.queue_deadline < 15


async def test_who_goes_away_is_not_decoded_for() -> None:
    engine = EngineDouble(held=True)
    async with gateway(engine) as (_, client):
        call = asyncio.ensure_future(client.post("/v1/translate", json=ONE))
        await engine.until(lambda: len(engine.submitted) == 1)
        call.cancel()
        await engine.until(lambda: len(engine.cancelled) == 1)
        engine.release()


async def test_tokens_are_wanted_here_too(tmp_path: Path) -> None:
    token, entry = new_token("reader", (Scope.INFER,), None)
    (tmp_path / "tokens.toml").write_text(entry)
    async with gateway(tokens=tmp_path / "tokens.toml", metrics_need_token=True) as (server, client):
        metrics = f"http://{server.metrics_address}/metrics"
        for path in ("/healthz", "/healthz/live", "/healthz/ready", "/", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        for headers, expected in (
            ({}, 401),
            ({"authorization": "Bearer x"}, 401),
            ({"authorization": f"Bearer {token}"}, 200),
        ):
            assert (await client.get(metrics, headers=headers)).status_code == expected
            assert (await client.get("/v1/models", headers=headers)).status_code == expected
            for endpoint in ENDPOINTS:
                answer = await client.post(endpoint.path, json=ONE, headers=headers)
                assert (answer.status_code == 401) is (expected == 401), endpoint
        assert (await client.get(f"http://{server.metrics_address}/healthz")).status_code == 200


async def test_the_models_are_listed() -> None:
    async with gateway() as (_, client):
        found = (await client.get("/v1/models")).json()
    assert [(one["name"], one["version"]) for one in found["models"]] == [("fake", "1")]


async def test_tls_is_the_same_and_swapped_certificates_are_used(tmp_path: Path) -> None:
    authority = trustme.CA()

    def write() -> None:
        certificate = authority.issue_cert("localhost")
        (tmp_path / "c.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        (tmp_path / "k.pem").write_bytes(certificate.private_key_pem.bytes())

    async def serial(port: str) -> int:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        writer.write(b"GET /healthz/live HTTP/1.0\r\n\r\n")
        assert b" 200 " in await reader.readline()
        found = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return int(found, 16)

    write()
    files = TlsFiles(tmp_path / "c.pem", tmp_path / "k.pem")
    async with running(EngineDouble(), http_port=0, host="localhost", tls=files) as server:
        assert server.http_address is not None
        port = server.http_address.rpartition(":")[2]
        first = await serial(port)
        write()
        assert await serial(port) != first


def test_the_description_knows_every_method_that_answers_in_json() -> None:
    api = openapi()
    described = {method for endpoint in ENDPOINTS for method in (endpoint.unary, endpoint.stream)} - {None}
    assert described == set(METHODS.values())
    references = json.dumps(api).count('"$ref"')
    assert references > 20
    for name in ("TranslateRequest", "DecodingOptions", "Hypothesis", "Error"):
        assert api["components"]["schemas"][name]["properties"]
    options = api["components"]["schemas"]["DecodingOptions"]["properties"]
    beams, penalty = {**options["beam_size"]}, {**options["length_penalty"]}
    assert (beams.pop("description"), bool(penalty.pop("description"))) == ("1: greedy", True)
    assert beams == {"type": ["integer", "null"], "minimum": 1, "maximum": 2**32 - 1}
    assert penalty == {"type": ["number", "null"], "format": "float", "minimum": -10, "maximum": 10}
    stopping = options["early_stopping"]
    assert {"EARLY_STOPPING_NEVER", True, False, "never", None} <= set(stopping["enum"])
    assert stopping["type"] == ["string", "boolean", "null"]
    assert api["components"]["schemas"]["Hypothesis"]["properties"]["text"]["type"] == "string"  # an answer's


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_ask_no_other_host(path: str) -> None:
    async with gateway() as (_, client):
        page = await client.get(path)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text


async def test_language_models_answer_in_json_and_as_it_comes() -> None:
    server = Server(ServeConfig(fake=True, grpc_port=0, metrics_port=0, http_port=0))
    async with (
        started(server),
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        asked = {"model": "fake-lm", "text": "hi ü"}
        once = await client.post("/v1/generate", json=asked)
        stream = await client.post("/v1/generate", json=asked, headers={"accept": "text/event-stream"})
        score = await client.post("/v1/score", json={"model": "fake-lm", "texts": [{"text": "hi"}]})
        wrong = await client.post("/v1/generate", json={"model": "fake", "text": "hi"})
        calls = server.metrics.triton.value(Triton.SUCCESS, "fake-lm", "1")
    assert once.json()["generations"][0]["text"] == "hi ü"
    pieces = [json.loads(event.removeprefix("data: ")) for event in stream.text.split("\n\n")[:-2]]
    assert "".join(piece.get("text", "") for piece in pieces) == "hi ü"
    assert pieces[-1]["finish_reason"] == "FINISH_REASON_EOS"
    assert stream.text.endswith("event: end\ndata: {}\n\n")
    assert score.json()["scores"][0]["scored_tokens"] == 2
    assert wrong.status_code == 400
    assert calls == 3


async def test_probes_are_answered_while_models_load() -> None:
    engine, began, may_load = EngineDouble(), threading.Event(), threading.Event()

    def slowly(observe: Observe) -> EngineDouble:
        began.set()
        assert may_load.wait(20)
        return engine

    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0, http_port=0)
    server = Server(config, replace(makers(engine), fake=slowly))
    starting = asyncio.ensure_future(server.start())
    assert await asyncio.to_thread(began.wait, 20)
    async with httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client:
        assert (await client.get("/healthz/live")).status_code == 200
        assert (await client.get("/healthz/ready")).status_code == 503
        assert (await client.post("/v1/translate", json=ONE)).status_code == 503
        may_load.set()
        await starting
        assert (await client.get("/healthz/ready")).status_code == 200
    await server.stop()
