"""What of the Ray application needs no Ray: its configuration, methods, metrics and scaling."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from beamline.ray.config import application
from beamline.ray.methods import handlers, paths_by_name
from beamline.ray.metrics import REPORT_SECONDS, Page
from beamline.ray.on_demand import ReplicaOpenInference
from beamline.ray.scaling import SLOTS, UTILIZATION, ByLoad
from beamline.serving.api.inference import METHODS
from beamline.serving.errors import BeamlineError
from beamline.serving.service import Service


class TestConfiguration:
    def test_args_are_the_options_of_serve(self, tmp_path: Path) -> None:
        read = application({"repo": str(tmp_path), "max_slots": 4, "load": ["a", "b/2"], "all_versions": "true"})
        assert read.config.repository == tmp_path
        assert (read.config.max_slots, read.config.load, read.config.all_versions) == (4, ("a", "b/2"), True)
        assert read.models_per_replica == 0
        assert not read.config.on_demand

    def test_models_per_replica_loads_them_as_they_are_asked_for(self, tmp_path: Path) -> None:
        read = application({"repo": str(tmp_path), "models_per_replica": "3"})
        assert read.models_per_replica == 3
        assert read.config.on_demand

    @pytest.mark.parametrize(
        ("args", "sentence"),
        [
            ({"grpc_port": 9000}, "Ray's proxies have the ports"),
            ({"drain_seconds": 3}, "graceful_shutdown_timeout_s"),
            ({"max_slotz": 3}, "'max_slotz'; there is .*max_slots"),
            ({"fake": True, "max_slots": 0}, "whole number from 1 on"),
            ({"fake": True, "models_per_replica": -1}, "whole number, 0"),
            ({"fake": True, "models_per_replica": 2}, "leave `fake` away"),
        ],
    )
    def test_what_is_wrong_is_said(self, args: dict[str, Any], sentence: str) -> None:
        with pytest.raises(BeamlineError, match=sentence):
            application(args)


def test_every_method_has_a_name_of_its_own_in_a_replica() -> None:
    found = handlers()
    names = paths_by_name(found)
    assert {f"/beamline.v1.Inference/{name}" for name in METHODS} <= set(found)
    assert "/inference.GRPCInferenceService/ModelInfer" in found
    assert "/grpc.health.v1.Health/Watch" not in found  # it would never end
    assert all(found[path] for path in names.values())


async def test_a_replica_answers_v2_with_the_model_loaded_first_and_changes_none() -> None:
    service = Service(application({"fake": True}).config)
    service.start_engines()
    await service.load_models()
    asked: list[str] = []

    async def ensure(name: str) -> None:
        asked.append(name)

    parts = (service.models, service.managing, service.lifecycle, service.workers)
    service.open_inference = ReplicaOpenInference(ensure, *parts)
    transport = httpx.ASGITransport(app=service.gateway_app([]))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
            answer = await client.post("/v2/models/fake/infer", json={"inputs": [tensor]})
            assert answer.json()["outputs"][0]["data"] == ["hello"]
            assert (await client.get("/v2/models/fake/config")).status_code == 200
            assert asked == ["fake", "fake"]
            refused = await client.post("/v2/repository/models/fake/unload", json={})
            assert (refused.status_code, "one replica of several" in refused.json()["error"]) == (501, True)
    finally:
        await service.stop()


class TestMetrics:
    ONE = (
        '# HELP a_total What.\n# TYPE a_total counter\na_total{model="m"} 3.0\n# HELP b Gauge.\n# TYPE b gauge\nb 1.0\n'
    )

    def test_replicas_stand_together_under_a_servers_names(self) -> None:
        page = Page()
        page.report("r1", self.ONE)
        page.report("r2", self.ONE.replace("3.0", "4.0"))
        families = {family.name: family for family in text_string_to_metric_families(page.text())}
        assert {
            (sample.labels["instance"], sample.labels.get("model"), sample.value)
            for name in ("a", "b")
            for sample in families[name].samples
        } == {("r1", "m", 3.0), ("r2", "m", 4.0), ("r1", None, 1.0), ("r2", None, 1.0)}

    def test_a_replica_that_is_gone_is_forgotten(self) -> None:
        now = 0.0
        page = Page(lambda: now)
        page.report("r1", self.ONE)
        now = 4 * REPORT_SECONDS
        page.report("r2", self.ONE)
        assert "r1" not in page.text()
        assert "r2" in page.text()


class TestScaling:
    @staticmethod
    def wanted(utilization: dict[str, float], running: int, queued: float = 0.0) -> float:
        context = SimpleNamespace(
            aggregated_metrics={UTILIZATION: utilization, SLOTS: dict.fromkeys(utilization, 8.0)},
            current_num_replicas=running,
            target_num_replicas=running,
            total_queued_requests=queued,
        )
        return ByLoad(0.8)(context)[0]

    def test_as_many_as_keep_each_at_the_target(self) -> None:
        assert self.wanted({"a": 1.6}, 1) == pytest.approx(2)
        assert self.wanted({"a": 0.4, "b": 0.4}, 2) == pytest.approx(1)
        assert self.wanted({"a": 0.0}, 1) == 0

    def test_one_that_has_not_reported_is_as_busy_as_the_others(self) -> None:
        assert self.wanted({"a": 1.6}, 2) == pytest.approx(4)
        assert self.wanted({}, 2) == 2

    def test_calls_that_wait_in_proxies_count_by_slots(self) -> None:
        assert self.wanted({"a": 0.8}, 1, queued=32) == pytest.approx(1 + 4 / 0.8)

    def test_a_target_must_make_sense(self) -> None:
        with pytest.raises(ValueError, match="must be above 0"):
            ByLoad(0)
