"""How large activations get, on real text: what an 8-bit product needs to round its rows by a fixed scale.

The graphs are run over some lines as a server would run them. An activation whose rows are about equally large gets a
fixed scale, which stands in the graph's metadata; a server then has less to compute (`serving/rewrites/quantized.py`).
One that now and then is many times as large as usual gets none: each of its rows keeps a scale of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from beamline.converters.certificate.graph_runner import Case, Feeds, GraphRunner
from beamline.converters.certificate.text_cases import longest_text, text_cases
from beamline.converters.version.weights import sha256_of
from beamline.serving.contract.manifest import FIXED_SCALES, File, Graphs, Manifest
from beamline.serving.errors import ConversionError

LINES = 64
_TOGETHER = 8
_MOST_STEPS = 40
_ROWS = 1024  # of each activation are kept, evenly spread
_MARGIN = 1.1  # for text that nobody has seen
_BYTE = 255
# How much more noise a fixed scale may make than scales of the rows. Those of the shipped model make two to six times
# as much, which no BLEU shows; one row among others that is a hundred times as large makes it hundreds.
_MOST_NOISE = 10.0
_GRAPHS = ("encoder", "prefill", "step")

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Calibration:
    """A part of `parity.json`."""

    lines: int
    fixed: int
    activations: int
    largest_noise: float  # of a fixed scale, as a multiple of what scales of the rows would make

    def rows(self) -> list[tuple[str, str, str]]:
        noise = f"{self.largest_noise:.1f}x"
        return [
            (f"fixed scales, of {self.activations} activations", str(self.fixed), ""),
            (f"largest noise of one, over {self.lines} lines", noise, f"<= {_MOST_NOISE:g}x"),
        ]


@dataclass
class _Seen:
    """One activation, over all runs."""

    low: float = 0.0
    high: float = 0.0
    kept: list[Floats] = field(default_factory=list)

    def add(self, rows: Floats) -> None:
        self.low, self.high = min(self.low, float(rows.min())), max(self.high, float(rows.max()))
        self.kept.append(rows)
        if sum(map(len, self.kept)) > 2 * _ROWS:
            self.kept = [np.concatenate(self.kept)[::2]]

    def scale(self) -> tuple[float, int]:
        span = _MARGIN * (self.high - self.low)
        return float(np.float32(span / _BYTE)), round(-_MARGIN * self.low / span * _BYTE)

    def noise(self) -> float:
        """Of the fixed scale, as a multiple of what scales of the rows make."""
        if not self.high > self.low:  # nothing but zeros, or not numbers
            return np.inf
        rows = np.concatenate(self.kept)
        own = np.maximum(np.abs(rows).max(1, keepdims=True), np.finfo(np.float32).tiny) / (_BYTE // 2)
        scale, zero = self.scale()
        fixed = (np.clip(np.rint(rows / scale) + zero, 0, _BYTE) - zero) * scale
        usual = float(np.square(np.rint(rows / own) * own - rows).mean())
        return float(np.square(fixed - rows).mean()) / usual if usual else np.inf


def calibration_cases(folder: Path, manifest: Manifest, lines: Sequence[str]) -> list[Case]:
    """The first lines that are neither empty nor too long."""
    if manifest.feature_width:
        raise ConversionError("--calibrate reads text, but this model's encoder reads features")
    cases = text_cases(folder, manifest, lines, LINES)
    if not cases:
        longest = longest_text(manifest)
        raise ConversionError(f"there is nothing to calibrate by: every line has more than {longest} tokens, or none")
    return cases


def calibrate(folder: Path, manifest: Manifest, cases: Sequence[Case]) -> tuple[Manifest, Calibration]:
    """Writes fixed scales into the 8-bit graphs of a version that is still being made."""
    paths = {name: folder / file.file for name, file in manifest.graphs if name in _GRAPHS and file is not None}
    models = {name: onnx.load(path, load_external_data=False) for name, path in paths.items()}
    seen = {name: {x: _Seen() for x in _multiplied(model.graph)} for name, model in models.items()}
    with _showing(folder, models, seen, manifest) as shown:
        _run(GraphRunner(folder, shown), cases, seen)
    files, noises = {}, dict[str, float]()
    for name, path in paths.items():
        noise = {x: each.noise() for x, each in seen[name].items() if each.kept}
        fixed = {x: seen[name][x].scale() for x, much in noise.items() if much <= _MOST_NOISE}
        models[name].metadata_props.add(key=FIXED_SCALES, value=json.dumps(fixed))
        path.write_bytes(models[name].SerializeToString())
        files[name] = File(file=path.name, sha256=sha256_of(path))
        noises |= {f"{name} {x}": much for x, much in noise.items()}
    found = [much for much in noises.values() if much <= _MOST_NOISE]
    calibration = Calibration(len(cases), len(found), len(noises), max(found, default=0.0))
    return manifest.model_copy(update={"graphs": Graphs(**{**dict(manifest.graphs), **files})}), calibration


def _run(graphs: GraphRunner, cases: Sequence[Case], seen: dict[str, dict[str, _Seen]]) -> None:
    """Those of about the same length together, up to where the first of them is likely to end."""

    def watch(name: str, feeds: Feeds, outputs: Feeds) -> None:
        for x, each in seen.get(name, {}).items():
            rows = outputs[x]
            if name == "encoder" and rows.shape[:-1] == feeds["source_mask"].shape:
                rows = rows[feeds["source_mask"]]  # what is padding may be anything
            each.add(rows.reshape(-1, rows.shape[-1]))

    graphs.watch = watch
    limits = graphs.manifest.limits
    ordered = sorted(cases, key=lambda case: len(case.source) or len(case.prompt))
    for begin in range(0, len(ordered), _TOGETHER):
        together = ordered[begin : begin + _TOGETHER]
        longest = max(len(case.prompt) for case in together)
        expected = len(together[0].source) or _MOST_STEPS
        graphs.beams(together, 1, max(1, min(expected, _MOST_STEPS, limits.max_target_length - longest - 1)))


def _multiplied(graph: onnx.GraphProto) -> list[str]:
    """The activations that are multiplied by 8-bit matrices."""
    stored = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    stored |= {node.output[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in stored}
    made = {output for node in graph.node for output in node.output}
    found = (node.input[0] for node in graph.node if node.op_type == "MatMul" and node.input[1] in stored)
    return [x for x in dict.fromkeys(found) if x in made]


@contextmanager
def _showing(
    folder: Path, models: dict[str, onnx.ModelProto], seen: dict[str, dict[str, _Seen]], manifest: Manifest
) -> Iterator[Manifest]:
    """Graphs beside them, with the same weights, that return what is multiplied, too; and a manifest that has them."""
    files = {name: File(file=f".showing-{name}.onnx", sha256="") for name in models}
    for name, original in models.items():
        model = onnx.ModelProto()
        model.CopyFrom(original)
        returned = {value.name for value in model.graph.output}
        model.graph.output.extend(
            helper.make_tensor_value_info(x, TensorProto.FLOAT, None) for x in seen[name] if x not in returned
        )
        (folder / files[name].file).write_bytes(model.SerializeToString())
    try:
        yield manifest.model_copy(update={"graphs": Graphs(**{**dict(manifest.graphs), **files})})
    finally:
        for file in files.values():
            (folder / file.file).unlink()
