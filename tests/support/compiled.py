"""Compiling the graphs of a version with tensorrt-rtx, for GPUs that need not be there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from beamline.converters.passes.lowering import lower
from beamline.converters.tensorrt.build import Built, build
from beamline.converters.tensorrt.library import find_library
from beamline.converters.tensorrt.profiles import chosen_buckets, extents
from beamline.converters.tensorrt.targets import CAPABILITIES
from beamline.converters.tensorrt.version import graphs
from beamline.serving.contract.manifest import AnyManifest, Manifest, StateKind, read_any_manifest, read_manifest

ONE_GPU = CAPABILITIES[1:2]
SLOTS = 8


def compile_lowered(version: Path, folder: Path, precision: str) -> dict[str, list[Built]]:
    """The same in another precision, made in `folder`."""
    shutil.copytree(version, folder, ignore=shutil.ignore_patterns("engines"))
    manifest, _ = lower(folder, read_manifest(folder), precision)
    return compile_version(folder, manifest)


def compile_version(
    folder: Path,
    manifest: AnyManifest | None = None,
    capabilities: Sequence[str] = ONE_GPU,
    all_buckets: bool = False,
    slots: int = SLOTS,
    only: str | None = None,
) -> dict[str, list[Built]]:
    """Every graph (or `only` one, where time is short), in one bucket or in all; by name. It fails on anything that
    TensorRT has to say against it. The step's caches must be appended to in place, and every attention must have stayed
    one."""
    manifest = manifest or read_any_manifest(folder)
    library, sizes = find_library("tensorrt_rtx"), extents(manifest, slots)
    buckets = chosen_buckets(manifest, ())
    found: dict[str, list[Built]] = {}
    for graph in graphs(folder, manifest, buckets if all_buckets else buckets[:1]):
        for capability in capabilities if only in (None, graph.name) else ():
            built = build(graph, sizes, library, capability)
            assert built.layers.get("ATTENTION_INPUT", 0) == graph.count("Attention")
            assert built.layers.get("KV_CACHE_UPDATE", 0) == graph.count("TensorScatter")
            found.setdefault(graph.name, []).append(built)
    caches = len(manifest.tensors(StateKind.CACHE)) if isinstance(manifest, Manifest) else 0
    for built in found.get("step", []):
        assert built.layers.get("KV_CACHE_UPDATE", 0) == caches
        assert built.layers["TOPK"] >= 3  # the search is inside
    return found
