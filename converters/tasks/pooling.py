"""A model that classifies or embeds: one graph, run once per request."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from beamline.converters.certificate.long_sequences import LONGEST
from beamline.converters.certificate.parity import ParityCertificate, Row
from beamline.converters.certificate.parity_text import parity_lines
from beamline.converters.certificate.progress import Each, silently
from beamline.converters.certificate.verify import LENGTHS, TEXT_LINES, TIE
from beamline.converters.checkpoints.files import every_reason
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer
from beamline.converters.conversion import Conversion, Draft, versions
from beamline.converters.export import EXAMPLE, TracedGraph
from beamline.converters.version.weights import WEIGHTS_FILE, WeightStore, sha256_of
from beamline.serving.contract.manifest import File, PooledManifest, Weights
from beamline.serving.errors import ConversionError
from beamline.serving.text.tokenizer import TextTokenizer

GRAPH_FILE = "pooled.onnx"
TOKENIZER_FILE = "tokenizer.json"
Outputs = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class LoadedPooledModel:
    """A checkpoint, ready for export, beside its original."""

    graph: nn.Module  # source, source_mask -> the outputs, in the order of `outputs`
    outputs: list[str]
    original: Callable[[Tensor, Tensor], dict[str, Tensor]]  # the same by name, in plain PyTorch
    tokenizer: OriginalTokenizer
    settings: dict[str, Any]  # of the manifest: all but files, name and version


@dataclass(frozen=True)
class PooledTolerance:
    value: float = 1e-4  # of a probability; of a vector, relative to its largest value
    label_exact: float = 1.0
    text_exact: float = 1.0


@dataclass(frozen=True)
class PooledCertificate(ParityCertificate):
    max_difference: float
    label_exact_share: float
    requests_compared: int
    text_exact_share: float
    lines_compared: int
    tolerance: PooledTolerance
    created_with: dict[str, str]

    def rows(self) -> list[Row]:
        return [
            ("largest difference", f"{self.max_difference:.2e}", f"<= {self.tolerance.value:g}"),
            (f"identical labels, of {self.requests_compared}", f"{self.label_exact_share:.2%}", ">= 100%"),
            (f"identical ids, of {self.lines_compared} lines", f"{self.text_exact_share:.2%}", ">= 100%"),
        ]

    def problems(self) -> list[str]:
        found = []
        if not self.max_difference <= self.tolerance.value:  # also catches a NaN
            found.append(f"outputs differ by up to {self.max_difference:.3g}")
        if self.label_exact_share < self.tolerance.label_exact:
            found.append(f"only {self.label_exact_share:.2%} of the labels are identical")
        if self.text_exact_share < self.tolerance.text_exact:
            found.append(f"only {self.text_exact_share:.2%} of the lines have identical ids")
        return found


class PoolingConverter(Conversion[LoadedPooledModel, PooledTolerance, PooledManifest, PooledCertificate]):
    def make(
        self, loaded: LoadedPooledModel, draft: Draft, tolerance: PooledTolerance | None
    ) -> tuple[PooledManifest, PooledCertificate]:
        if draft.precision != "float32":
            raise ConversionError(f"a model that classifies or embeds is stored in float32, not {draft.precision}")
        folder = draft.folder
        loaded.graph.eval()
        tokenizer = self.save_tokenizer(loaded.tokenizer, folder / TOKENIZER_FILE, loaded.settings["vocabulary_size"])
        self._manifest(draft, loaded, tokenizer, complete=False)
        draft.advance("export encoder")
        _export(loaded, folder)
        manifest = self._manifest(draft, loaded, tokenizer, complete=True)
        draft.advance("verify")
        return manifest, verify_pooled(folder, manifest, loaded, tolerance or PooledTolerance(), draft.each)

    def _manifest(self, draft: Draft, loaded: LoadedPooledModel, tokenizer: File, complete: bool) -> PooledManifest:
        """An incomplete one has no graph yet: better refused now than after the export."""
        weights, graph = draft.folder / WEIGHTS_FILE, draft.folder / GRAPH_FILE
        with every_reason(self.source):
            return PooledManifest(
                name=draft.name,
                version=draft.version,
                family=self.family,
                graph=File(file=GRAPH_FILE, sha256=sha256_of(graph) if complete else ""),
                weights=Weights(
                    file=WEIGHTS_FILE,
                    sha256=sha256_of(weights) if complete else "",
                    bytes=weights.stat().st_size if complete else 0,
                ),
                tokenizer=tokenizer,
                created_with=versions(),
                **loaded.settings,
            )


def _export(loaded: LoadedPooledModel, folder: Path) -> None:
    batch, length = EXAMPLE["B"], EXAMPLE["S"]
    arguments = (torch.zeros(batch, length, dtype=torch.int64), torch.ones(batch, length, dtype=torch.bool))
    names = ["source", "source_mask"]
    exported = TracedGraph(loaded.graph, arguments, names, loaded.outputs, [("B", "S"), ("B", "S")]).export()
    with (folder / WEIGHTS_FILE).open("wb") as file:
        WeightStore(file).move_out(exported)
        ir.save(exported, folder / GRAPH_FILE)
        file.flush()
        os.fsync(file.fileno())


def verify_pooled(
    folder: Path,
    manifest: PooledManifest,
    loaded: LoadedPooledModel,
    tolerance: PooledTolerance,
    each: Each = silently,
) -> PooledCertificate:
    """The graph against the original, every request alone and all of them in one batch."""
    session = ort.InferenceSession(str(folder / GRAPH_FILE), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    words = [word for word in range(manifest.vocabulary_size) if word != manifest.pad_id]
    lengths = [length for length in LENGTHS if length <= manifest.max_source_length]
    lengths.append(min(LONGEST, manifest.max_source_length))
    sources = [random.choice(words, length).tolist() for length in lengths]
    batched = _run(session, sources, manifest.pad_id)
    difference, same, compared = 0.0, 0, 0
    for row, source in each("outputs", list(enumerate(sources))):
        wanted = _original(loaded, source)
        alone = {name: values[0] for name, values in _run(session, [source], manifest.pad_id).items()}
        for found in (alone, {name: values[row] for name, values in batched.items()}):
            difference = max(difference, *(_difference(found[name], wanted[name]) for name in wanted))
            same += _same_label(found, wanted)
            compared += 1
    lines = parity_lines(TEXT_LINES)
    tokenizer = TextTokenizer.load(folder / manifest.tokenizer.file)
    exact = sum(tokenizer.encode(line) == loaded.tokenizer.encode(line) for line in each("ids", lines))
    certificate = PooledCertificate(
        max_difference=difference,
        label_exact_share=same / compared,
        requests_compared=compared,
        text_exact_share=exact / len(lines),
        lines_compared=len(lines),
        tolerance=tolerance,
        created_with=manifest.created_with,
    )
    certificate.check()
    return certificate


def _original(loaded: LoadedPooledModel, source: Sequence[int]) -> Outputs:
    ids = torch.tensor([list(source)])
    with torch.no_grad():
        found = loaded.original(ids, torch.ones_like(ids, dtype=torch.bool))
    return {name: tensor[0].float().numpy() for name, tensor in found.items()}


def _run(session: ort.InferenceSession, sources: Sequence[Sequence[int]], pad_id: int) -> Outputs:
    longest = max(map(len, sources))
    ids = np.array([[*source, *[pad_id] * (longest - len(source))] for source in sources], np.int64)
    mask = np.array([[place < len(source) for place in range(longest)] for source in sources])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"source": ids, "source_mask": mask}), strict=True))


def _difference(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    return float(np.abs(found - wanted).max() / max(1.0, float(np.abs(wanted).max())))


def _same_label(found: Outputs, wanted: Outputs) -> bool:
    """Or a tie."""
    if "probabilities" not in wanted:
        return True
    best, other = int(wanted["probabilities"].argmax()), int(found["probabilities"].argmax())
    return best == other or abs(wanted["probabilities"][best] - wanted["probabilities"][other]) < TIE
