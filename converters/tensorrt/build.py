"""One graph in one bucket for one GPU -> a plan and its card."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamline.converters.tensorrt import lint, timing_cache
from beamline.converters.tensorrt.graph import Graph
from beamline.converters.tensorrt.library import BuildLog, Library, logger_for
from beamline.converters.tensorrt.profiles import Extent, profile
from beamline.converters.version.atomic_write import write_whole
from beamline.serving.contract.manifest import AnyManifest, File
from beamline.serving.contract.tensorrt_plans import PlanCard, PlanTensor, ShapeRange, plan_stem
from beamline.serving.errors import ConversionError

log = logging.getLogger(__name__)

CURRENT = "current"  # the GPU that is there
# Operators that must have become one layer each: decomposed into others, they would be slow or copy the cache.
_EXPECTED = {"TensorScatter": "KV_CACHE_UPDATE", "Attention": "ATTENTION_INPUT"}
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "BOOL": "bool",
}


class BuildFailure(ConversionError):
    """With everything that TensorRT had to say against it."""

    def __init__(self, what: str, reasons: Iterable[str]) -> None:
        self.reasons = list(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{what} can't be built for TensorRT:{lines}")


@dataclass(frozen=True)
class Built:
    content: bytes
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    layers: dict[str, int]
    activation_bytes: int | None
    seconds: float


def build(
    graph: Graph,
    sizes: Mapping[str, Extent],
    library: Library,
    capability: str,
    timings: Path | None = None,
) -> Built:
    """lint -> parse -> profiles -> build. Raises `BuildFailure` with every problem at once. `capability`: one, or
    several for one plan ("80,86"). `timings`: the file of the timing cache."""
    refuse_unbuildable(graph)
    began = time.perf_counter()
    trt, said = library.module, BuildLog()
    logger = logger_for(library, said)
    builder = trt.Builder(logger)
    network = _parse(graph, library, builder, logger, said)
    _check_types(graph, network)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # set by default; float32 means float32, as with ONNX Runtime
    if library.ahead_of_time:
        # It allocates nothing when it runs, so that it can be recorded, or is refused here. tensorrt has no such flag.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    _add_profile(builder, config, profile(graph, sizes), graph)
    _set_capability(config, library, capability)
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    _allow_decomposition(trt, layers)
    kinds = Counter(layer.type.name for layer in layers)
    _expect_layers(graph, kinds)
    cache = timing_cache.attach(config, timings, said) if timings is not None else None
    with said.during("building"):
        plan = builder.build_serialized_network(network, config)
    title = f"{graph.path} ({capability})"
    if plan is None:
        raise BuildFailure(title, [*said.problems(), *said.tactics] or ["TensorRT gave no reason"])
    if said.problems():
        raise BuildFailure(title, said.problems())
    if said.tactics:
        count, first = len(said.tactics), said.tactics[0]
        log.warning("%s: built without some kernels; TensorRT reported %d errors, the first: %s", title, count, first)
    if cache is not None and timings is not None:
        timing_cache.keep(config, timings)
    return Built(
        bytes(plan),
        graph.inputs,
        graph.outputs,
        dict(sorted(kinds.items())),
        said.activation_bytes,
        time.perf_counter() - began,
    )


def refuse_unbuildable(graph: Graph) -> None:
    """Raises `BuildFailure` for what TensorRT is known not to take, or to take and compute wrongly."""
    found = lint.problems(graph)
    if found:
        raise BuildFailure(str(graph.path), found)


def _parse(graph: Graph, library: Library, builder: Any, logger: Any, said: BuildLog) -> Any:
    trt = library.module
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    with said.during("parsing"):
        parsed = parser.parse(graph.model.SerializeToString(), str(graph.path))
    if not parsed or said.problems():
        errors = [str(parser.get_error(number)) for number in range(parser.num_errors)]
        raise BuildFailure(str(graph.path), errors or said.problems() or ["TensorRT gave no reason"])
    return network


def _add_profile(builder: Any, config: Any, ranges: Mapping[str, ShapeRange], graph: Graph) -> None:
    wanted = builder.create_optimization_profile()
    for name, each in ranges.items():
        wanted.set_shape(name, each.smallest, each.usual, each.largest)
    if config.add_optimization_profile(wanted) < 0:  # the only sign that a shape above was refused
        raise BuildFailure(str(graph.path), [f"its shapes are no valid profile: {dict(ranges)}"])


def _set_capability(config: Any, library: Library, capability: str) -> None:
    if not library.ahead_of_time:
        if capability != CURRENT:
            raise ConversionError(
                f"tensorrt builds only for the GPU that is there, not for {capability}; use tensorrt-rtx for others"
            )
        return
    known, wanted = library.module.ComputeCapability.__members__, capability.split(",")
    config.num_compute_capabilities = len(wanted)
    for place, each in enumerate(wanted):
        check_capability(library, each)
        if not config.set_compute_capability(known["CURRENT" if each == CURRENT else f"SM{each}"], place):
            raise ConversionError(f"tensorrt-rtx {library.version} refused compute capability {each}")


def check_capability(library: Library, capability: str) -> None:
    if not library.ahead_of_time or capability == CURRENT:
        return
    known = library.module.ComputeCapability.__members__
    if f"SM{capability}" not in known:
        allowed = ", ".join(each[2:] for each in known if each.startswith("SM"))
        raise ConversionError(f"tensorrt-rtx can't build for compute capability {capability}; it can for {allowed}")


def _allow_decomposition(trt: Any, layers: Iterable[Any]) -> None:
    """Attention in float32 has no fused kernel; without this, the build fails."""
    for layer in layers:
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _expect_layers(graph: Graph, kinds: Mapping[str, int]) -> None:
    missing = [
        f"{graph.count(operator)} {operator} became {kinds.get(layer, 0)} layers of the kind {layer}"
        for operator, layer in _EXPECTED.items()
        if graph.count(operator) != kinds.get(layer, 0)
    ]
    if missing:
        raise BuildFailure(str(graph.path), missing)


def _check_types(graph: Graph, network: Any) -> None:
    """TensorRT's idea of each input and output must be the graph's, or they would be bound wrongly."""
    theirs = {
        each.name: _DTYPES.get(each.dtype.name, each.dtype.name)
        for count, get in ((network.num_inputs, network.get_input), (network.num_outputs, network.get_output))
        for each in map(get, range(count))
    }
    ours = {each.name: each.dtype for each in (*graph.inputs, *graph.outputs)}
    wrong = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if wrong:
        raise BuildFailure(
            str(graph.path), [f"{name} is {ours.get(name)}, but TensorRT makes it {theirs.get(name)}" for name in wrong]
        )


def save(
    built: Built,
    graph: Graph,
    sizes: Mapping[str, Extent],
    folder: Path,
    manifest: AnyManifest,
    library: Library,
    capability: str,
) -> PlanCard:
    """The plan first, then the card: without one, no server looks at it."""
    stem = plan_stem(graph.name, graph.cache_length, capability, library.name)
    file = dict(manifest.graphs)[graph.name]
    assert file is not None
    card = PlanCard(
        graph=graph.name,
        graph_sha256=file.sha256,
        weights_sha256=manifest.weights.sha256,
        module=library.name,
        module_version=library.version,
        capability=capability,
        cache_length=graph.cache_length,
        max_slots=sizes["B"].largest,
        inputs=built.inputs,
        outputs=built.outputs,
        profile=profile(graph, sizes),
        aliases=graph.aliases,
        plan=File(file=f"{stem}.plan", sha256=hashlib.sha256(built.content).hexdigest()),
        plan_bytes=len(built.content),
        build_seconds=round(built.seconds, 3),
        activation_bytes=built.activation_bytes,
        layers=built.layers,
        tf32=False,
    )
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}.json").unlink(missing_ok=True)
    write_whole(folder / card.plan.file, built.content)
    write_whole(folder / f"{stem}.json", (card.model_dump_json(indent=2) + "\n").encode())
    return card
