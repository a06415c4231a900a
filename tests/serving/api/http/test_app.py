from __future__ import annotations

import asyncio

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from starlette.testclient import TestClient

from beamline.serving.api.http.app import operations_app
from beamline.serving.errors import ShuttingDown
from beamline.serving.lifecycle import Lifecycle, Phase
from beamline.serving.telemetry.metrics import Metrics


async def test_health_follows_the_phase() -> None:
    lifecycle = Lifecycle()
    client = TestClient(operations_app(Metrics(), lifecycle))
    for phase, code, text in (
        (Phase.LOADING, 503, "loading"),
        (Phase.READY, 200, "ok"),
        (Phase.DRAINING, 503, "draining"),
    ):
        lifecycle.phase = phase
        response = client.get("/healthz")
        assert (response.status_code, response.text) == (code, text)


async def test_a_server_that_failed_is_not_live_again_while_it_ends() -> None:
    lifecycle = Lifecycle()
    client = TestClient(operations_app(Metrics(), lifecycle))
    lifecycle.phase = Phase.FAILED
    for phase in (Phase.READY, Phase.LEAVING, Phase.DRAINING):
        lifecycle.phase = phase
        for path in ("/healthz/live", "/healthz/ready"):
            assert (client.get(path).status_code, client.get(path).text) == (503, "failed")


@pytest.mark.parametrize(
    "phases", [[Phase.FAILED], [Phase.FAILED, Phase.DRAINING], [Phase.DRAINING, Phase.DRAINING]], ids=str
)
async def test_a_body_that_arrives_is_not_waited_for_by_a_server_that_ends(phases: list[Phase]) -> None:
    lifecycle = Lifecycle()
    reading, over = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async with lifecycle.arriving():
            reading.set()
            await over.wait()

    arriving = asyncio.create_task(read())
    await reading.wait()
    for phase in phases:
        lifecycle.phase = phase
        await asyncio.sleep(0)  # the body's time is over now, but its reader has not heard of it
    with pytest.raises(ShuttingDown):
        async with asyncio.timeout(10):
            await arriving
    with pytest.raises(ShuttingDown):
        async with lifecycle.arriving():
            pass


async def test_without_a_model_the_server_is_not_ready() -> None:
    served: list[str] = []
    lifecycle = Lifecycle(lambda: bool(served))
    client = TestClient(operations_app(Metrics(), lifecycle))
    assert client.get("/healthz/ready").text == "loading"
    lifecycle.phase = Phase.READY
    assert (client.get("/healthz/ready").status_code, client.get("/healthz/ready").text) == (503, "no model is served")
    assert client.get("/healthz/live").status_code == 200
    with lifecycle.call():  # a call is admitted; the look-up of its model refuses it, and says why
        pass
    served.append("de")
    assert client.get("/healthz/ready").status_code == 200


async def test_metrics_are_prometheus_text() -> None:
    response = TestClient(operations_app(Metrics(), Lifecycle())).get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "beamline_build_info" in response.text


async def test_metrics_are_open_metrics_and_small_for_who_takes_that() -> None:
    metrics = Metrics()
    metrics.observer("de", "de", "1")
    client = TestClient(operations_app(metrics, Lifecycle()))
    plain = client.get("/metrics", headers={"accept-encoding": "identity"})
    packed = client.get("/metrics", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.text == plain.text
    response = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.1"})
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family.type for family in openmetrics(response.text)}  # a strict parser
    assert families["beamline_calls"] == "counter"
    assert families["nv_inference_count"] == "unknown"
