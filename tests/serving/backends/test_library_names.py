"""Every name that we use of TensorRT and of CUDA exists in the installed packages.

Neither can be run without a GPU, and neither has types; so a misspelt method would first be found on somebody's server.
The names are read from our source: an attribute of a variable whose class is known here.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt
from cuda.bindings import driver as cuda

from beamline.serving.backends.cuda_resources import _LOST

ROOT = Path(__file__).parents[3]

# file -> expression -> what it is
CLASSES: dict[str, dict[str, Any]] = {
    "converters/tensorrt/build.py": {
        "trt": trt,
        "library.module": trt,
        "builder": trt.Builder,
        "network": trt.INetworkDefinition,
        "parser": trt.OnnxParser,
        "config": trt.IBuilderConfig,
        "wanted": trt.IOptimizationProfile,
        "layer": trt.IAttentionInputLayer,
        "layer.attention": trt.IAttention,
        "trt.LayerType": trt.LayerType,
        "trt.BuilderFlag": trt.BuilderFlag,
        "trt.NetworkDefinitionCreationFlag": trt.NetworkDefinitionCreationFlag,
    },
    "converters/tensorrt/timing_cache.py": {"config": trt.IBuilderConfig, "cache": trt.ITimingCache},
    "converters/tensorrt/library.py": {"trt": trt, "trt.ILogger": trt.ILogger, "self.module": trt},
    "serving/backends/tensorrt.py": {
        "library": trt,
        "self._library": trt,
        "self._runtime": trt.Runtime,
        "self._engine": trt.ICudaEngine,
        "engine": trt.ICudaEngine,
        "context": trt.IExecutionContext,
        "self._context": trt.IExecutionContext,
        "config": trt.IRuntimeConfig,
        "self._library.ExecutionContextAllocationStrategy": trt.ExecutionContextAllocationStrategy,
        "self._library.CudaGraphStrategy": trt.CudaGraphStrategy,
    },
    "serving/backends/tensorrt_messages.py": {"library": trt, "library.ILogger": trt.ILogger},
    "serving/backends/cuda.py": {
        "self._cuda": cuda,
        "driver": cuda,
        "self._cuda.CUresult": cuda.CUresult,
        "self._cuda.CUmemorytype": cuda.CUmemorytype,
        "flags": cuda.CUevent_flags,
        "driver.CUstream_flags": cuda.CUstream_flags,
        "driver.CUmemAllocationType": cuda.CUmemAllocationType,
        "driver.CUmemLocationType": cuda.CUmemLocationType,
        "driver.CUmemPool_attribute": cuda.CUmemPool_attribute,
        "names": cuda.CUmemPool_attribute,
        "wanted": cuda.CUDA_MEMCPY3D,
    },
    "serving/backends/cuda_graphs.py": {
        "self._cuda": cuda,
        "self._cuda.CUresult": cuda.CUresult,
        "self._cuda.CUstreamCaptureMode": cuda.CUstreamCaptureMode,
    },
    "serving/backends/cuda_resources.py": {
        "driver": cuda,
        "self._cuda": cuda,
        "self._cuda.CUresult": cuda.CUresult,
        "cuda": cuda,
        "cuda.CUresult": cuda.CUresult,
    },
    "serving/backends/probe.py": {
        "cuda": cuda,
        "cuda.CUresult": cuda.CUresult,
        "wanted": cuda.CUdevice_attribute,
    },
}
# Names of ours that happen to be called like one of theirs: the protocol in front of the library.
OURS = {
    "serving/backends/tensorrt.py": {
        "activation_bytes",
        "context",
        "load",
        "set_shape",
        "set_address",
        "enqueue",
        "last_error",
    }
}


def used(path: Path) -> list[tuple[str, str, int]]:
    """(expression, attribute, line) for every attribute in the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (ast.unparse(node.value), node.attr, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    ]


@pytest.mark.parametrize("file", CLASSES)
def test_every_name_exists(file: str) -> None:
    known, ours = CLASSES[file], OURS.get(file, set())
    found = [(known[owner], name, line) for owner, name, line in used(ROOT / file) if owner in known]
    missing = [
        f"{file}:{line}: {getattr(owner, '__name__', owner)} has no {name}"
        for owner, name, line in found
        if name not in ours and not hasattr(owner, name)
    ]
    assert missing == []
    unseen = set(known) - {owner for owner, _, _ in used(ROOT / file)}
    assert unseen == set(), "the test looks for what the code does not use any more"


def test_nothing_else_touches_the_libraries() -> None:
    """A new file that imports one of them must be listed above."""
    importing = {
        str(path.relative_to(ROOT))
        for package in ("serving", "converters")
        for path in (ROOT / package).rglob("*.py")
        if any(text in path.read_text(encoding="utf-8") for text in ("import tensorrt", "from cuda.bindings"))
    }
    assert importing <= set(CLASSES)


@pytest.mark.parametrize("name", ["FLOAT", "HALF", "BF16", "INT64", "INT32", "INT8", "BOOL"])
def test_types_have_the_names_that_we_read(name: str) -> None:
    assert trt.DataType.__members__[name].name == name


def test_severities_have_the_names_that_we_read() -> None:
    assert {"INTERNAL_ERROR", "ERROR", "WARNING"} <= set(trt.ILogger.Severity.__members__)
    assert {"SM80", "SM86", "SM89", "SM120"} <= set(trt.ComputeCapability.__members__)
    assert {"ATTENTION_INPUT", "KV_CACHE_UPDATE", "TOPK", "RECURRENCE"} <= set(trt.LayerType.__members__)


def test_errors_have_the_names_that_we_read() -> None:
    assert set(cuda.CUresult.__members__) >= _LOST


def test_a_machine_without_a_driver_says_so() -> None:
    """The probe is safe anywhere; here it must come back, with devices or with a reason."""
    from beamline.serving.backends.probe import probe

    found = probe()
    assert bool(found.devices) != bool(found.reason)
