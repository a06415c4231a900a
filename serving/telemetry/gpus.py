"""What NVIDIA's management library (NVML) says of GPUs, where nvidia-ml-py is installed: asked when Prometheus asks."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

UTILISATION = "gpu_utilisation_ratio"
USED, TOTAL = "gpu_memory_used_bytes", "gpu_memory_total_bytes"
TEXTS = {
    UTILISATION: "Share of the last moment in which a GPU computed anything (NVML, with nvidia-ml-py).",
    USED: "Memory of a GPU that is in use, by whichever process (NVML).",
    TOTAL: "Memory of a GPU (NVML).",
}


class GpuCollector(Collector):
    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())  # so that nobody is asked before Prometheus asks

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = {name: GaugeMetricFamily(f"beamline_{name}", text, labels=["gpu"]) for name, text in TEXTS.items()}
        for number, handle in self._handles.items():
            for name, value in self._values(handle).items():
                found[name].add_metric([str(number)], value)
        yield from found.values()

    def _values(self, handle: Any) -> dict[str, float]:
        """What it says; a part of a GPU (MIG) has no utilisation, and one that is lost says nothing."""
        values: dict[str, float] = {}
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            values[USED], values[TOTAL] = memory.used, memory.total
            values[UTILISATION] = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except self._nvml.NVMLError as error:
            log.debug("NVML says: %s", error)
        return values


def watch_gpus(registry: CollectorRegistry, uuids: Mapping[int, str]) -> bool:
    """Whether there will be metrics of any. `uuids`: by CUDA's numbers, which are not NVML's."""
    if not uuids:
        return False
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        log.info("nvidia-ml-py is not installed: there are no metrics of the GPUs' utilisation")
        return False
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.warning("there are no metrics of the GPUs' utilisation: NVML says: %s", error)
        return False
    handles = dict[int, Any]()
    for number, uuid in uuids.items():
        try:
            handles[number] = _handle(nvml, uuid)
        except nvml.NVMLError as error:
            log.warning("there are no metrics of GPU %d's utilisation: NVML says of %s: %s", number, uuid, error)
    if handles:
        registry.register(GpuCollector(nvml, handles))
    return bool(handles)


def _handle(nvml: Any, uuid: str) -> Any:
    """Of a GPU or of a part of one (MIG): CUDA does not say which it is, and NVML wants to know."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
