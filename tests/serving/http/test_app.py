from __future__ import annotations

from starlette.testclient import TestClient

from serving.http.app import build_app
from serving.lifecycle import Lifecycle, Phase
from serving.metrics import Metrics


async def test_health_follows_the_phase() -> None:
    lifecycle = Lifecycle()
    client = TestClient(build_app(Metrics(), lifecycle))
    for phase, code, text in (
        (Phase.LOADING, 503, "loading"),
        (Phase.READY, 200, "ok"),
        (Phase.DRAINING, 503, "draining"),
    ):
        lifecycle.phase = phase
        response = client.get("/healthz")
        assert (response.status_code, response.text) == (code, text)


async def test_metrics_are_prometheus_text() -> None:
    response = TestClient(build_app(Metrics(), Lifecycle())).get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "beamline_build_info" in response.text
