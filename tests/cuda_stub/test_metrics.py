"""What /metrics says of GPUs: by the real nvidia-ml-py over a stub of its library, and by a model's own counts."""

from __future__ import annotations

import gc

import pytest
from prometheus_client import CollectorRegistry

from beamline.serving.backends.probe import probe
from beamline.serving.contract.stats import StepStats
from beamline.serving.telemetry.gpus import watch_gpus
from beamline.serving.telemetry.metrics import Metrics
from tests.cuda_stub.conftest import MODELS
from tests.cuda_stub.conversation import load, talk
from tests.support.cuda_stub.stub import Stub


def uuids() -> dict[int, str]:
    return {device.number: device.uuid for device in probe().devices}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"beamline_gpu_{name}", labels)


def test_nvidias_library_is_asked_for_the_gpus_by_their_ids(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_STUB_DEVICES", "2")
    registry = CollectorRegistry()
    assert watch_gpus(registry, dict(reversed(uuids().items())))
    assert "nvmlDeviceGetMemoryInfo" not in stub.counts()  # before Prometheus asks
    found = {gpu: value(registry, "utilisation_ratio", gpu=gpu) for gpu in ("0", "1")}
    assert found == {"0": 0.37, "1": 0.38}
    assert value(registry, "memory_total_bytes", gpu="1") == 24 * 2**30
    assert value(registry, "memory_used_bytes", gpu="0") == stub.held.device_bytes[0]
    stub.lose(1)
    assert value(registry, "utilisation_ratio", gpu="1") is None
    assert value(registry, "utilisation_ratio", gpu="0") == 0.37


UNKNOWN = {7: "07070707-0707-0707-0707-070707070707"}


def test_a_gpu_that_it_does_not_know(stub: Stub) -> None:
    registry = CollectorRegistry()
    assert not watch_gpus(registry, UNKNOWN)
    assert not watch_gpus(registry, {})
    assert list(registry.collect()) == []


def test_a_part_of_a_gpu_and_one_that_it_does_not_know_cost_the_others_nothing(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_STUB_DEVICES", "2")
    monkeypatch.setenv("CUDA_STUB_MIG", "1")
    registry = CollectorRegistry()
    assert watch_gpus(registry, UNKNOWN | uuids())
    found = {gpu: value(registry, "utilisation_ratio", gpu=gpu) for gpu in ("0", "1", "7")}
    assert found == {"0": 0.37, "1": None, "7": None}
    assert value(registry, "memory_total_bytes", gpu="1") == 24 * 2**30  # a part has memory of its own
    assert value(registry, "memory_total_bytes", gpu="7") is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "there are no metrics of GPU 7's utilisation"
    ]


@pytest.mark.usefixtures("plausible")
def test_a_models_own_counts(stub: Stub) -> None:
    """Steps, replays, copies and waits of a conversation, and the memory of its slots."""
    metrics = Metrics()
    engine = load(MODELS / "transformer" / "float32")
    observe, steps = metrics.observer("m", "m", "1"), 0

    def counted(stats: StepStats) -> None:
        nonlocal steps
        steps += stats.active > 0
        observe(stats)

    engine.observe = counted
    talk(engine)
    engine.step()  # idle, so the device is asked
    registry = metrics.registry

    def of_m(name: str) -> float:
        found = value(registry, name, model="m")
        assert found is not None, name
        return found

    made, replayed = of_m("steps_total"), of_m("graph_replays_total")
    waits, copies = of_m("waits_total"), of_m("copies_total")
    assert made >= steps > 20
    assert made > replayed > made / 3
    assert made <= waits < 2 * made  # one for each step; more to catch up, and for scores
    assert copies > 2 * made
    assert 0 < of_m("used_bytes") <= of_m("reserved_bytes") <= stub.held.device_bytes[0]
    assert of_m("step_seconds_total") > 0
    del engine
    gc.collect()
