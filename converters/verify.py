"""The exported graphs against the original PyTorch model, and the certificate of it.

The step graph is run as a server would (encoder once, then step after step, each fed with what the last one returned),
over a grid of beam widths and source lengths, every request alone and all of them in one batch. Beside it runs a
plain beam search over the original model, without caches and without batching. Both must keep the same beams with the
same scores. The score graph must give the original's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from converters.parity_text import parity_lines
from converters.precision import INT8_LIMIT, Int8Loss
from serving.errors import ParityFailure
from serving.manifest import Manifest, StateKind
from serving.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from converters.base import Loaded

Sequences = list[tuple[int, ...]]
TIE = 1e-4  # two candidates whose scores differ by less may be taken in either order
BEAM_WIDTHS = (1, 2, 4)
SOURCE_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)
STEPS = 12
TEXT_LINES = 2000


@dataclass(frozen=True)
class Tolerance:
    log_prob: float = 1e-3
    beam_exact: float = 1.0  # the share of requests that must keep the very same beams, ties aside
    text_exact: float = 1.0


@dataclass(frozen=True)
class Certificate:
    """`parity.json`."""

    max_log_prob_difference: float
    beam_exact_share: float
    beams_compared: int
    ties: int
    text_exact_share: float
    lines_compared: int
    tolerance: Tolerance
    created_with: dict[str, str]
    int8: Int8Loss | None = None  # where the verified graphs were then made smaller

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        rows = [
            (
                "largest log-probability difference",
                f"{self.max_log_prob_difference:.2e}",
                f"<= {self.tolerance.log_prob:g}",
            ),
            (
                f"identical beams, of {self.beams_compared} ({self.ties} ties)",
                f"{self.beam_exact_share:.2%}",
                f">= {self.tolerance.beam_exact:.0%}",
            ),
            (
                f"identical ids and text, of {self.lines_compared} lines",
                f"{self.text_exact_share:.2%}",
                f">= {self.tolerance.text_exact:.0%}",
            ),
        ]
        if self.int8 is not None:
            difference = f"{self.int8.mean_log_prob_difference:.2e}"
            rows.append(("8-bit weights: mean log-probability difference", difference, f"<= {INT8_LIMIT:g}"))
        width = max(len(row[0]) for row in rows)
        return "\n".join(f"  {name:<{width}}  {value:>10}  {limit}" for name, value, limit in rows)

    def problems(self) -> list[str]:
        found = []
        if not self.max_log_prob_difference <= self.tolerance.log_prob:  # also catches a NaN
            found.append(f"log-probabilities differ by up to {self.max_log_prob_difference:.3g}")
        if self.beam_exact_share < self.tolerance.beam_exact:
            found.append(f"only {self.beam_exact_share:.2%} of the beams are identical")
        if self.text_exact_share < self.tolerance.text_exact:
            found.append(f"only {self.text_exact_share:.2%} of the lines have identical ids and text")
        return found


def verify(folder: Path, manifest: Manifest, loaded: Loaded, tolerance: Tolerance) -> Certificate:
    graphs = _Graphs(folder, manifest)
    sources = _random_sources(manifest)
    difference = _score_difference(graphs, loaded, sources, manifest)
    compared = exact = ties = 0
    for width in BEAM_WIDTHS:
        if width > manifest.limits.max_beam_size:
            continue
        steps = min(STEPS, manifest.limits.max_target_length - 1)
        expected = [_plain_beams(loaded, source, width, steps) for source in sources]
        alone = [graphs.beams([source], width, steps)[0] for source in sources]
        batched = graphs.beams(sources, width, steps)
        for want, *found in zip(expected, alone, batched, strict=True):
            for got in found:
                compared += 1
                if got.sequences == want.sequences:
                    exact += 1
                    difference = max(difference, float(np.abs(got.scores - want.scores).max()))
                elif want.margin < TIE:
                    exact += 1
                    ties += 1
    lines = parity_lines(TEXT_LINES)
    certificate = Certificate(
        max_log_prob_difference=difference,
        beam_exact_share=exact / compared,
        beams_compared=compared,
        ties=ties,
        text_exact_share=_text_exact_share(folder, manifest, loaded, lines),
        lines_compared=len(lines),
        tolerance=tolerance,
        created_with=manifest.created_with,
    )
    if certificate.problems():
        raise ParityFailure(
            "the exported model is not the one that was brought: "
            + "; ".join(certificate.problems())
            + f"\n{certificate.table()}"
        )
    return certificate


def _random_sources(manifest: Manifest) -> Sequences:
    random = np.random.default_rng(0)
    limit = manifest.limits.max_source_length
    lengths = [length for length in SOURCE_LENGTHS if length <= limit]
    special = {manifest.vocabulary.pad_id}
    words = [word for word in range(manifest.vocabulary.source_size) if word not in special]
    return [tuple(random.choice(words, length).tolist()) for length in lengths]


@dataclass(frozen=True)
class _Beams:
    sequences: Sequences  # best first, start token included
    scores: NDArray[np.float32]
    margin: float = np.inf  # by how much the closest decision was made


# -- the graphs ----------------------------------------------------------------------------------------------------


class _Graphs:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        def session(name: str) -> ort.InferenceSession:
            options = ort.SessionOptions()
            options.log_severity_level = 3  # it warns that caches are copied; here they are, and it does not matter
            return ort.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])

        self.manifest = manifest
        self.encoder = session(manifest.graphs.encoder.file) if manifest.graphs.encoder else None
        self.step = session(manifest.graphs.step.file)
        self.score = session(manifest.graphs.score.file)

    def beams(self, sources: Sequences, width: int, steps: int) -> list[_Beams]:
        manifest, batch = self.manifest, len(sources)
        ids, mask = _padded(sources, manifest.vocabulary.pad_id)
        assert self.encoder is not None
        outputs = _run(self.encoder, {"source": ids, "source_mask": mask})
        scores = np.full((batch, width), -1e9, np.float32)
        scores[:, 0] = 0
        start = manifest.vocabulary.start_id
        no_edit = np.zeros((batch, width, 0), np.float32)
        feeds: dict[str, NDArray[Any]] = {
            "tokens": np.full((batch, width), start),
            "positions": np.zeros(batch, np.int64),
            "write_index": np.zeros(batch, np.int64),
            "scores": scores,
            "ancestry": np.zeros((batch, width, width * steps), np.bool_),
            "width": np.full(batch, width),
            "independent": np.full(batch, width == 1),
            "forced": np.full(batch, -1),
            "edit_index": no_edit.astype(np.int64),
            "edit_scale": no_edit,
            "edit_add": no_edit,
            "sample_rows": np.zeros(0, np.int64),
            "sampling": np.zeros((0, 5), np.float32),
            "report_rows": np.zeros(0, np.int64),
        }
        axes = {"B": batch, "K": width, "C": width * steps, "S": ids.shape[1]}
        for tensor in manifest.state:
            if tensor.name == "source_mask":
                feeds[tensor.name] = mask
            elif tensor.kind is StateKind.RECURRENT:
                feeds[tensor.name] = np.repeat(outputs[tensor.name][:, None], width, axis=1)
            elif tensor.name in outputs:
                feeds[tensor.name] = outputs[tensor.name]
            else:
                feeds[tensor.name] = np.zeros([axes.get(axis, axis) for axis in tensor.shape], tensor.dtype)  # type: ignore[arg-type]
        carried = ["tokens", "positions", "write_index", "scores", "ancestry"]
        carried += [tensor.name for tensor in manifest.state if tensor.kind is not StateKind.MEMORY]

        kept: list[Sequences] = [[(start,)] * width for _ in sources]
        for _ in range(steps):
            outputs = _run(self.step, feeds)
            feeds |= {name: outputs[f"next_{name}"] for name in carried}
            for row in range(batch):
                parents, tokens = outputs["parents"][row], outputs["next_tokens"][row]
                kept[row] = [(*kept[row][parent], int(token)) for parent, token in zip(parents, tokens, strict=True)]
        return [_Beams(sequences, feeds["scores"][row]) for row, sequences in enumerate(kept)]


def _run(session: ort.InferenceSession, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    names = [output.name for output in session.get_outputs()]
    wanted = {argument.name for argument in session.get_inputs()}
    values = session.run(names, {name: value for name, value in feeds.items() if name in wanted})
    return dict(zip(names, values, strict=True))


def _padded(sources: Sequences, pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    longest = max(map(len, sources))
    ids = np.array([(*source, *([pad_id] * (longest - len(source)))) for source in sources], np.int64)
    mask = np.array([[index < len(source) for index in range(longest)] for source in sources])
    return ids, mask


# -- the original --------------------------------------------------------------------------------------------------


def _log_probs(loaded: Loaded, source: Sequence[int], targets: Sequence[Sequence[int]]) -> torch.Tensor:
    """[targets, T, V], by the original, one source for all."""
    ids = torch.tensor([list(source)] * len(targets))
    with torch.no_grad():
        logits = loaded.original(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([list(t) for t in targets]))
    return logits.float().log_softmax(-1)


def _plain_beams(loaded: Loaded, source: Sequence[int], width: int, steps: int) -> _Beams:
    """Beam search without ends: the living beams after so many steps."""
    eos = set(loaded.vocabulary.eos_ids)
    beams: list[tuple[tuple[int, ...], float]] = [((loaded.vocabulary.start_id,), 0.0)]
    margin = np.inf
    for _ in range(steps):
        last = _log_probs(loaded, source, [sequence for sequence, _ in beams])[:, -1]
        if loaded.forbidden:  # only where log-probabilities are renormalised
            last[:, list(loaded.forbidden)] = -torch.inf
            last = last.log_softmax(-1)
        top = last.topk(min(2 * width + len(eos) * width + 1, last.shape[1]))
        extended = [
            ((*sequence, token), score + value)
            for (sequence, score), values, tokens in zip(beams, top.values.tolist(), top.indices.tolist(), strict=True)
            for value, token in zip(values, tokens, strict=True)
            if token not in eos
        ]
        extended.sort(key=lambda beam: -beam[1])
        closest = min(a[1] - b[1] for a, b in pairwise(extended[: width + 1]))
        margin = min(margin, closest)
        beams = extended[:width]
    return _Beams([sequence for sequence, _ in beams], np.array([score for _, score in beams], np.float32), margin)


def _score_difference(graphs: _Graphs, loaded: Loaded, sources: Sequences, manifest: Manifest) -> float:
    """The score graph over random targets, all in one batch, against the original one by one."""
    random = np.random.default_rng(1)
    length = min(STEPS, manifest.limits.max_target_length - 1)
    labels = random.integers(0, manifest.vocabulary.target_size, (len(sources), length))
    targets = np.concatenate([np.full((len(sources), 1), manifest.vocabulary.start_id), labels[:, :-1]], axis=1)
    ids, mask = _padded(sources, manifest.vocabulary.pad_id)
    feeds = {"source": ids, "source_mask": mask, "target": targets, "labels": labels}
    found = _run(graphs.score, feeds)["token_log_probs"]
    difference = 0.0
    for row, source in enumerate(sources):
        expected = _log_probs(loaded, source, [targets[row].tolist()])[0]
        wanted = expected.gather(1, torch.tensor(labels[row])[:, None])[:, 0].numpy()
        difference = max(difference, float(np.abs(found[row] - wanted).max()))
    return difference


# -- the tokenizers ------------------------------------------------------------------------------------------------


def _text_exact_share(folder: Path, manifest: Manifest, loaded: Loaded, lines: Sequence[str]) -> float:
    source = TextTokenizer.load(folder / manifest.tokenizers.source.file)
    target = TextTokenizer.load(folder / manifest.tokenizers.target.file)

    def same(line: str) -> bool:
        ids = loaded.source_text.encode(line)
        target_ids = loaded.target_text.encode(line)
        return (
            source.encode(line) == ids
            and target.encode(line) == target_ids
            and target.decode(target_ids) == loaded.target_text.decode(target_ids)
        )

    return sum(map(same, lines)) / len(lines)
