"""From float32 graphs to another precision, and what that costs: the same requests on both, compared.

The export has been compared with PyTorch before; here the lowered graphs are compared with that export, on ONNX
Runtime's CPU (those in half rounded behind every operator, as a GPU's kernels do), and the result becomes part of the
certificate.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from beamline.converters.certificate.graph_runner import Case
from beamline.converters.certificate.precision import PrecisionCheck, compare
from beamline.converters.passes.half import half_state, simulated, to_half
from beamline.converters.passes.int4 import quantise_blocks
from beamline.converters.passes.int8 import quantise_weights
from beamline.converters.version.weights import WEIGHTS_FILE, WeightStore, restore_full_precision, sha256_of
from beamline.serving.contract.manifest import File, Graphs, Manifest, StateTensor, Weights
from beamline.serving.errors import ConversionError, ParityFailure

_WORK = ".lowered"
_SIMULATED = ".simulated"


@dataclass(frozen=True)
class Lowering:
    """How graphs come to a precision."""

    graph: Callable[[ir.Model, Sequence[StateTensor]], None]  # changes the graph
    state: Callable[[Sequence[StateTensor]], tuple[StateTensor, ...]]  # what lives in a slot afterwards
    simulate: Callable[[ir.Model], None] | None = None  # where ONNX Runtime's CPU does not compute in it


def _half(precision: str) -> Lowering:
    return Lowering(
        lambda model, state: to_half(model, state, precision),
        lambda state: half_state(state, precision),
        lambda model: simulated(model, precision),
    )


def _few_bits(quantise: Callable[[ir.Model], int]) -> Lowering:
    """Only weights change; what lives in a slot stays as it is."""

    def graph(model: ir.Model, state: Sequence[StateTensor]) -> None:
        restore_full_precision(model)
        quantise(model)

    return Lowering(graph, tuple)


LOWERINGS: Mapping[str, Lowering] = {
    "float16": _half("float16"),
    "bfloat16": _half("bfloat16"),
    "int8": _few_bits(quantise_weights),
    "int4": _few_bits(quantise_blocks),
}
_ADVICE = {
    "float16": ". It needs --precision float32",
    "bfloat16": ". Try --precision float16, whose numbers are finer but end at 65504, or keep float32",
    "int8": ". It needs --precision float32",
    "int4": ". Try --precision int8",
}
_ADVICE_ON_OVERFLOW = {
    **_ADVICE,
    "float16": ": in float16 they end at 65504. Try --precision bfloat16, whose numbers are as large as float32's",
    "bfloat16": ". It needs --precision float32",
}


def lower(
    folder: Path, manifest: Manifest, precision: str, text: Sequence[Case] = ()
) -> tuple[Manifest, PrecisionCheck]:
    """Replaces the graphs of a version that is still being made. Raises `ParityFailure` where they differ too much, on
    random words or on real text."""
    if precision not in LOWERINGS:
        raise ConversionError(f"{precision} is no precision that graphs can be brought to: {', '.join(LOWERINGS)}")
    lowering = LOWERINGS[precision]
    work = folder / _WORK
    lowered = write_lowered(folder, manifest, work, precision, lowering.graph, lowering.state(manifest.state))
    if lowering.simulate is None:
        check = compare(folder, manifest, work, lowered, precision, text=text)
    else:
        check = _compare_simulated(folder, manifest, precision, lowering)
    if check.problems():
        advice = _ADVICE if check.is_finite else _ADVICE_ON_OVERFLOW
        raise ParityFailure(
            f"in {precision} the model is not the same any more: {'; '.join(check.problems())}{advice[precision]}"
        )
    take_over(work, folder)
    return lowered, check


def _compare_simulated(folder: Path, manifest: Manifest, precision: str, lowering: Lowering) -> PrecisionCheck:
    simulate = lowering.simulate
    assert simulate is not None

    def graph(model: ir.Model, state: Sequence[StateTensor]) -> None:
        lowering.graph(model, state)
        simulate(model)

    work = folder / _SIMULATED
    simulated_manifest = write_lowered(folder, manifest, work, precision, graph, manifest.state)
    try:
        return compare(folder, manifest, work, simulated_manifest, precision, optimise=False)
    finally:
        shutil.rmtree(work)


def write_lowered(
    folder: Path,
    manifest: Manifest,
    work: Path,
    precision: str,
    change: Callable[[ir.Model, Sequence[StateTensor]], None],
    state: tuple[StateTensor, ...],
) -> Manifest:
    """The changed graphs with weights of their own, and the manifest that describes them."""
    work.mkdir()
    files: dict[str, File] = {}
    with (work / WEIGHTS_FILE).open("wb") as out:
        store = WeightStore(out)
        for name, file in manifest.graphs:
            if file is None:
                continue
            model = ir.load(folder / file.file)
            change(model, manifest.state)
            store.move_out(model)
            ir.save(model, work / file.file)
            files[name] = File(file=file.file, sha256=sha256_of(work / file.file))
        out.flush()
        os.fsync(out.fileno())
    weights = work / WEIGHTS_FILE
    return Manifest.model_validate(
        {
            **dict(manifest),
            "graphs": Graphs(**files),
            "weights": Weights(file=weights.name, sha256=sha256_of(weights), bytes=weights.stat().st_size),
            "state": state,
            "precision": precision,
        }
    )


def take_over(work: Path, folder: Path) -> None:
    """What was written aside replaces what it was made from."""
    for file in work.iterdir():
        file.replace(folder / file.name)
    work.rmdir()
