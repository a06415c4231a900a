"""What the studio asks besides inference: who may, and what comes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2 as httpx
import pytest

from beamline.serving.api.http.openapi import openapi
from beamline.serving.api.http.operating import DESCRIPTIONS
from beamline.serving.config import ServeConfig
from beamline.serving.security.access import Scope
from beamline.serving.security.tokens import new_token
from beamline.serving.server import Server
from tests.serving.doubles import started
from tests.support.processes import ROOT
from tests.support.shipped import shipped

READ = ("/v1/models", "/v1/repository", "/v1/live")


async def test_the_repository_the_certificate_and_the_last_ten_minutes() -> None:
    config = ServeConfig(
        repository=ROOT / "model_repo", grpc_port=0, metrics_port=0, http_port=0, threads=2, engines=2, load=("en-de",)
    )
    async with (
        started(Server(config)) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        listed = (await client.get("/v1/repository")).json()["models"]
        certificate = await client.get(f"/v1/repository/en-de/{shipped('en-de').name}/certificate")
        missing = await client.get("/v1/repository/en-de/99/certificate")
        outside = await client.get("/v1/repository/..%2F..%2Fetc/3/certificate")
        calls = [client.post("/v1/translate", json={"inputs": [{"text": "Save the file."}] * 4}) for _ in range(3)]
        await asyncio.gather(*calls)
        live = (await client.get("/v1/live")).json()
        batch = (await client.get("/v1/live/batch")).json()
        (card,) = (await client.get("/v1/models")).json()["models"]
        form = await client.post("/v1/repository/en-de/unload", data={"a": "b"})  # what another site's form could send
        filled = await client.post("/v1/repository/en-de/unload", json={"force": True})
        endless = await client.post(
            "/v1/repository/en-de/unload", content=b" " * 100_000, headers={"content-type": "application/json"}
        )
        unloaded = await client.post("/v1/repository/en-de/unload", json={})
        unknown = await client.post("/v1/repository/nobody/load", json={})
    states = {(each["name"], each["state"]) for each in listed}
    assert states == {("en-de", "READY"), ("en-de-gru", "UNAVAILABLE")}
    assert certificate.json() == json.loads((shipped("en-de") / "parity.json").read_text())
    assert (missing.status_code, outside.status_code) == (404, 404)
    (model,) = live["models"]
    assert sum(point["requests"] for point in model["points"]) == 12
    assert sum(point["tokens"] for point in model["points"]) > 12
    (slots,) = batch["models"]
    assert slots["running"] == []
    assert len(slots["finished"]) >= 12  # one for each slot that a request had: some moved
    assert {each["slot"] for each in slots["finished"]} & set(range(16, 32))  # the second engine's
    assert all(each["began"] >= each["ended"] >= 0 for each in slots["finished"])
    assert card["limits"]["max_beam_size"] == 16
    assert card["defaults"]["beam_size"] == 4
    assert form.status_code == 400
    assert "application/json" in form.json()["error"]["message"]
    assert [filled.status_code, endless.status_code] == [400, 413]
    assert "must be an empty object" in filled.json()["error"]["message"]
    assert {each["state"] for each in unloaded.json()["models"]} <= {"UNAVAILABLE", "UNLOADING"}
    assert unknown.status_code == 404


async def test_reading_needs_a_token_and_changing_an_operators(tmp_path: Path) -> None:
    reader, one = new_token("reader", (Scope.INFER,), None)
    operator, other = new_token("operator", (Scope.INFER, Scope.ADMIN), None)
    (tmp_path / "tokens.toml").write_text(f"{one}\n{other}\n")
    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0, http_port=0, tokens=tmp_path / "tokens.toml")
    async with (
        started(Server(config)) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        for token, wanted, restricted in ((None, 401, 401), (reader, 200, 403), (operator, 200, 200)):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            for path in READ:
                assert (await client.get(path, headers=headers)).status_code == wanted, path
            assert (await client.get("/v1/live/batch", headers=headers)).status_code == restricted
            answer = await client.post("/v1/repository/fake/unload", json={}, headers=headers)
            assert answer.status_code == (restricted if restricted != 200 else 400)  # a fake can't be unloaded
        refused = server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "unauthenticated"})
        assert refused == len(READ) + 2


async def test_a_version_of_any_length_is_checked_as_every_call(tmp_path: Path) -> None:
    reader, one = new_token("reader", (Scope.INFER,), None)
    (tmp_path / "tokens.toml").write_text(one)
    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0, http_port=0, tokens=tmp_path / "tokens.toml")
    async with (
        started(Server(config)) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        for version in ("9" * 5000, "newest"):
            path = f"/v1/repository/fake/{version}/certificate"
            stranger = await client.get(path)
            known = await client.get(path, headers={"authorization": f"Bearer {reader}"})
            assert [stranger.status_code, known.status_code] == [401, 404]
            sentence = f"there is no version '{version[:20]}' of a model 'fake' here"
            assert known.json()["error"]["message"] == sentence
        refused = server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "unauthenticated"})
    assert refused == 2


@pytest.mark.parametrize(("verb", "path"), DESCRIPTIONS)
def test_they_are_described(verb: str, path: str) -> None:
    operation = openapi()["paths"][path][verb]
    assert operation["summary"]
    assert len(operation.get("parameters", [])) == path.count("{")
