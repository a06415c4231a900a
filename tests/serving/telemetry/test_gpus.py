"""Without nvidia-ml-py, or where it knows nothing of a GPU; over its real package: tests/cuda_stub/test_metrics.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Never

import pytest
from prometheus_client import CollectorRegistry

from beamline.serving.telemetry.gpus import watch_gpus


class NVMLError(Exception):
    pass


def management_library() -> SimpleNamespace:
    """As nvidia-ml-py answers."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3, total=7),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50, memory=20),
    )


def refuse(*arguments: object) -> Never:
    raise NVMLError("Not Supported")


def test_it_need_not_be_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    caplog.set_level("INFO")
    assert not watch_gpus(CollectorRegistry(), {0: "0"})
    assert "nvidia-ml-py is not installed" in caplog.text


def test_without_a_driver_it_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse))
    assert not watch_gpus(CollectorRegistry(), {0: "0"})
    assert "NVML says: Not Supported" in caplog.text


def test_a_part_of_a_gpu_has_memory_and_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = management_library()
    nvml.nvmlDeviceGetUtilizationRates = refuse
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    registry = CollectorRegistry()
    assert watch_gpus(registry, {2: "2"})
    assert registry.get_sample_value("beamline_gpu_memory_used_bytes", {"gpu": "2"}) == 3
    assert registry.get_sample_value("beamline_gpu_utilisation_ratio", {"gpu": "2"}) is None
