"""The exported graphs against the original PyTorch model, and the certificate of it.

The graphs are run as a server would (`graph_runner.py`), over a grid of beam widths and lengths of sources or prompts,
every request alone and all of them in one batch. Beside them runs a plain beam search over the original model, without
caches and without batching (`original.py`). Both must keep the same beams with the same scores. The score graph must
give the original's log-probabilities. One comparison goes to the model's limit (`long_sequences.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from beamline.converters.certificate.graph_runner import Case, GraphRunner
from beamline.converters.certificate.long_sequences import LONGEST, compare_long
from beamline.converters.certificate.original import log_probs, plain_beams
from beamline.converters.certificate.parity import ParityCertificate, Row
from beamline.converters.certificate.parity_text import parity_lines
from beamline.converters.certificate.progress import Each, silently
from beamline.serving.contract.manifest import Manifest
from beamline.serving.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from beamline.converters.certificate.precision import PrecisionCheck
    from beamline.converters.checkpoints.tokenizers import OriginalTokenizer
    from beamline.converters.passes.calibration import Calibration
    from beamline.converters.tasks.generation import LoadedModel

TIE = 1e-4  # two candidates whose scores differ by less may be taken in either order
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)
TEXT_LINES = 2000


@dataclass(frozen=True)
class Grid:
    """What is compared. The original answers word by word and without a cache, so a large one takes minutes."""

    beam_widths: tuple[int, ...] = (1, 2, 4)
    lengths: tuple[int, ...] = LENGTHS
    steps: int = 12
    longest: int = LONGEST


GRIDS = {"whole": Grid(), "quick": Grid(beam_widths=(1, 4), lengths=(1, 5, 21), steps=6, longest=64)}


@dataclass(frozen=True)
class Tolerance:
    log_prob: float = 1e-3
    beam_exact: float = 1.0  # the share of requests that must keep the very same beams, ties aside
    text_exact: float = 1.0


@dataclass(frozen=True)
class VocabularyCheck:
    """One side's tokenizer, where source and target have each their own."""

    side: Literal["source", "target"]
    words: int  # of the tokenizer
    rows: int  # of the embedding
    exact_share: float  # of the lines, against the original tokenizer
    example: str | None  # a text whose ids the user knows, and which came out as they are


@dataclass(frozen=True)
class Certificate(ParityCertificate):
    max_log_prob_difference: float
    beam_exact_share: float
    beams_compared: int
    ties: int
    longest_compared: int  # tokens of a source, or of a prompt and what follows it
    text_exact_share: float
    lines_compared: int
    tolerance: Tolerance
    created_with: dict[str, str]
    vocabularies: tuple[VocabularyCheck, ...] = ()  # source and target, where they have each their own tokenizer
    lowered: PrecisionCheck | None = None  # where the verified graphs were then brought to another precision
    calibration: Calibration | None = None  # where activations got fixed scales

    def rows(self) -> list[Row]:
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
            ("longest sequence compared, in tokens", str(self.longest_compared), ""),
            (
                f"identical ids and text, of {self.lines_compared} lines",
                f"{self.text_exact_share:.2%}",
                f">= {self.tolerance.text_exact:.0%}",
            ),
        ]
        for each in self.vocabularies:
            compared = f"the {each.side}'s, of {each.words} words and {each.rows} rows"
            rows.append((compared, f"{each.exact_share:.2%}", f">= {self.tolerance.text_exact:.0%}"))
        if self.lowered is not None:
            rows += self.lowered.rows()
        if self.calibration is not None:
            rows += self.calibration.rows()
        return rows

    def problems(self) -> list[str]:
        found = []
        if not self.max_log_prob_difference <= self.tolerance.log_prob:  # also catches a NaN
            found.append(f"log-probabilities differ by up to {self.max_log_prob_difference:.3g}")
        if self.beam_exact_share < self.tolerance.beam_exact:
            found.append(f"only {self.beam_exact_share:.2%} of the beams are identical")
        if self.text_exact_share < self.tolerance.text_exact:
            found.append(f"only {self.text_exact_share:.2%} of the lines have identical ids and text")
        return found


def verify(
    folder: Path,
    manifest: Manifest,
    loaded: LoadedModel,
    tolerance: Tolerance,
    each: Each = silently,
    grid: Grid = GRIDS["whole"],
) -> Certificate:
    graphs = GraphRunner(folder, manifest)
    steps = min(grid.steps, manifest.limits.max_target_length - 1)
    cases = _random_cases(manifest, grid.lengths, steps)
    difference = _score_difference(graphs, loaded, cases, steps, each)
    compared = exact = ties = 0
    for width in grid.beam_widths:
        if width > manifest.limits.max_beam_size:
            continue
        batched = graphs.beams(cases, width, steps)
        for case, together in each(f"beam width {width}", list(zip(cases, batched, strict=True))):
            want, margin = plain_beams(loaded, case, width, steps)
            found = (graphs.beams([case], width, steps)[0], together)
            for got in found:
                compared += 1
                if got.sequences == want.sequences:
                    exact += 1
                    difference = max(difference, float(np.abs(got.scores - want.scores).max()))
                elif margin < TIE:
                    exact += 1
                    ties += 1
    [longest] = (
        compare_long(graphs, loaded, case, TIE, grid.longest) for case in each("the longest sequence", cases[:1])
    )
    lines = parity_lines(TEXT_LINES)
    text_exact_share, vocabularies = _compare_text(folder, manifest, loaded, each("ids and text", lines))
    certificate = Certificate(
        max_log_prob_difference=max(difference, longest.difference),
        beam_exact_share=(exact + longest.exact) / (compared + longest.compared),
        beams_compared=compared + longest.compared,
        ties=ties + longest.ties,
        longest_compared=longest.tokens,
        text_exact_share=text_exact_share,
        lines_compared=len(lines),
        tolerance=tolerance,
        created_with=manifest.created_with,
        vocabularies=vocabularies,
    )
    certificate.check()
    return certificate


def _random_cases(manifest: Manifest, lengths: Sequence[int], steps: int) -> list[Case]:
    random = np.random.default_rng(0)
    vocabulary, limits = manifest.vocabulary, manifest.limits
    words = [word for word in range(vocabulary.source_size) if word != vocabulary.pad_id]

    def text(length: int) -> tuple[int, ...]:
        return tuple(random.choice(words, length).tolist())

    if manifest.task == "generate":
        room = limits.max_target_length - steps
        return [Case((), text(length)) for length in lengths if length <= min(room, limits.max_source_length)]
    lengths = [length for length in lengths if length <= limits.max_source_length]
    if manifest.feature_width:
        grids = [random.standard_normal((length, manifest.feature_width)).astype(np.float32) for length in lengths]
        return [Case(grid, (vocabulary.start_id,)) for grid in grids]
    return [Case(text(length), (vocabulary.start_id,)) for length in lengths]


def _score_difference(graphs: GraphRunner, loaded: LoadedModel, cases: Sequence[Case], steps: int, each: Each) -> float:
    """The score graph over random targets, all in one batch, against the original one by one."""
    manifest, random = graphs.manifest, np.random.default_rng(1)
    text = random.integers(0, manifest.vocabulary.target_size, (len(cases), 1 + steps))
    # Padding is no word of a text, and may have no position of its own.
    text[text == manifest.vocabulary.pad_id] = manifest.vocabulary.eos_ids[0]
    if manifest.task == "translate":
        text[:, 0] = manifest.vocabulary.start_id
    targets, labels = text[:, :-1], text[:, 1:]
    found = graphs.token_log_probs(cases, targets, labels)
    difference = 0.0
    for row, case in each("scores", list(enumerate(cases))):
        expected = log_probs(loaded, case.source, [targets[row].tolist()])[0]
        wanted = expected.gather(1, torch.tensor(labels[row])[:, None])[:, 0].numpy()
        difference = max(difference, float(np.abs(found[row] - wanted).max()))
    return difference


# -- the tokenizers ------------------------------------------------------------------------------------------------


class _Side:
    """One side's tokenizer as it will be served, beside the original."""

    def __init__(self, served: TextTokenizer, original: OriginalTokenizer, *, decodes: bool) -> None:
        self.served, self.original, self.decodes = served, original, decodes

    def same(self, line: str) -> bool:
        ids = self.original.encode(line)
        if self.served.encode(line) != ids:
            return False
        return not self.decodes or self.served.decode(ids) == self.original.decode(ids)


def _compare_text(
    folder: Path, manifest: Manifest, loaded: LoadedModel, lines: Iterable[str]
) -> tuple[float, tuple[VocabularyCheck, ...]]:
    """The share of lines that are the same on both sides, and each side's, where there are two vocabularies."""
    files, vocabulary, examples = manifest.tokenizers, manifest.vocabulary, loaded.examples
    source = _Side(TextTokenizer.load(folder / files.source.file), loaded.source_tokenizer, decodes=False)
    target = _Side(TextTokenizer.load(folder / files.target.file), loaded.target_tokenizer, decodes=True)
    found = [(source.same(line), target.same(line)) for line in lines]
    share = sum(map(all, found)) / len(found)
    if loaded.source_tokenizer is loaded.target_tokenizer:
        return share, ()
    sources, targets = (sum(side) / len(found) for side in zip(*found, strict=True))
    read, written = (examples.source.text, examples.target.text) if examples else (None, None)
    return share, (
        VocabularyCheck("source", source.served.vocab_size, vocabulary.source_size, sources, read),
        VocabularyCheck("target", target.served.vocab_size, vocabulary.target_size, targets, written),
    )
