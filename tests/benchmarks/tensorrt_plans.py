"""`python -m tests.benchmarks.tensorrt_plans`: what TensorRT plans of the Marian-base shape cost, per cache length.

Build time, size on disk, and GPU memory: weights (in the plan), activations (what the builder asks for), and arenas
(what the slots take). Needs tensorrt-rtx, and no GPU.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

from beamline.converters.passes.lowering import LOWERINGS, write_lowered
from beamline.converters.tensorrt.build import build
from beamline.converters.tensorrt.library import find_library
from beamline.converters.tensorrt.memory import MIB, arena_bytes
from beamline.converters.tensorrt.profiles import chosen_buckets, extents
from beamline.converters.tensorrt.version import graphs
from beamline.serving.contract.manifest import Manifest, read_manifest
from tests.benchmarks import shape
from tests.benchmarks.made import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tensorrt_plans", description=__doc__)
    parser.add_argument("--precision", choices=("float32", *LOWERINGS), default="float16")
    parser.add_argument("--compute-capability", default="86")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--buckets", default="", help="cache lengths, e.g. 64,256 (default: as `beamline build`)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where the model is kept")
    options = parser.parse_args()
    folder = shape.for_beamline(options.cache.resolve())
    manifest = read_manifest(folder)
    with tempfile.TemporaryDirectory() as work:
        if options.precision != "float32":
            lowering = LOWERINGS[options.precision]
            lowered = Path(work) / "lowered"
            state = lowering.state(manifest.state)
            manifest = write_lowered(folder, manifest, lowered, options.precision, lowering.graph, state)
            folder = lowered
        _measure(folder, manifest, options)


def _measure(folder: Path, manifest: Manifest, options: argparse.Namespace) -> None:
    library, sizes = find_library("tensorrt_rtx"), extents(manifest, options.slots)
    buckets = chosen_buckets(manifest, [int(part) for part in options.buckets.split(",") if part])
    print(
        f"Marian-base shape, {options.precision}, weights {manifest.weights.bytes / MIB:,.0f} MiB, "
        f"{library.name} {library.version}, compute capability {options.compute_capability}, {options.slots} slots"
    )
    header = ("graph", "cache", "build s", "plan MiB", "activations MiB", "arenas MiB")
    print(" | ".join(f"{title:>15}" for title in header))
    total = 0
    for graph in graphs(folder, manifest, buckets):
        built = build(graph, sizes, library, options.compute_capability)
        total += len(built.content)
        arenas = (
            ""
            if graph.cache_length is None
            else f"{arena_bytes(manifest, options.slots, graph.cache_length) / MIB:,.0f}"
        )
        cells = (
            graph.name,
            str(graph.cache_length or ""),
            f"{built.seconds:.1f}",
            f"{len(built.content) / MIB:,.1f}",
            f"{(built.activation_bytes or 0) / MIB:,.0f}",
            arenas,
        )
        print(" | ".join(f"{cell:>15}" for cell in cells), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"all plans: {total / MIB:,.0f} MiB; the builder's own peak memory: {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
