"""The same requests through the float32 graphs and through lowered ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beamline.converters.certificate.graph_runner import Case, GraphRunner
from beamline.serving.contract.manifest import Manifest

_WIDTH, _STEPS = 4, 12
_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34) * 4
# Largest and mean difference of a log-probability. In half precision they grow with the depth: the shipped en-de shows
# 0.02 and 0.0015 in float16, 0.09 and 0.011 in bfloat16, SmolLM2-135M with its 30 layers 0.03 and 0.0042, 0.27 and
# 0.034; a mistake shows far more. 8-bit weights move single words by more, and many beams: there the mean decides, and
# a mistake would make it far larger.
_LIMITS = {"float16": (0.1, 0.01), "bfloat16": (0.5, 0.1), "int8": (None, 0.5), "int4": (None, 1.0)}
_SAME_BEST = {"float16": 0.8, "bfloat16": 0.5, "int8": 0.0, "int4": 0.0}
# Of the words that float32 writes on real text, how many must be the best ones of few bits, too. The shipped models
# show 0.99 in int8 and 0.96 in int4; what they lose are near ties. So little can be asked of all words (random weights
# show 0.9 and 0.5, and a mistake in a scale leaves next to nothing), but much of those of which float32 is sure, where
# the second best is e times less likely: there the shipped models show 1.0 in both. (Random weights show 1.0 and 0.8
# to 0.9: in int4 they need not pass.) On random words, even a good model is at sea, and its beams are easily upset:
# there nothing can be asked.
_SAME_WORDS = {"int8": 0.8, "int4": 0.4}
_SAME_SURE_WORDS = {"int8": 0.97, "int4": 0.85}
_SURE = 1.0  # so far ahead of the second best, in log-probability
_FEWEST_SURE = 20  # of fewer words a share says nothing
_TOGETHER = 8
_MOST_STEPS = 40


@dataclass(frozen=True)
class TextAgreement:
    """Words on real text: of those that float32 would write next, how many the other graphs would write next, too."""

    lines: int
    words: int
    share: float
    required: float
    sure_words: int  # of them, where float32's best word is far ahead of its second best
    sure_share: float
    sure_required: float

    def rows(self, precision: str) -> list[tuple[str, str, str]]:
        title = f"{precision}, same best words, of {self.words} in {self.lines} lines"
        rows = [(title, f"{self.share:.2%}", f">= {self.required:.0%}")]
        if self.sure_required:
            title = f"{precision}, the same, of {self.sure_words} that are sure"
            rows.append((title, f"{self.sure_share:.2%}", f">= {self.sure_required:.0%}"))
        return rows

    def problems(self) -> list[str]:
        limits = {
            "best words": (self.share, self.required),
            "best words that are far ahead": (self.sure_share, self.sure_required),
        }
        return [
            f"on real text, only {share:.0%} of the {what} are the same as in float32; at least {required:.0%} must be"
            for what, (share, required) in limits.items()
            if share < required
        ]


@dataclass(frozen=True)
class PrecisionCheck:
    """A part of `parity.json`."""

    precision: str
    max_log_prob_difference: float
    mean_log_prob_difference: float
    same_best_share: float  # requests whose best beam is the same as in float32, token for token
    requests_compared: int
    max_log_prob_allowed: float | None
    mean_log_prob_allowed: float
    same_best_required: float
    text: TextAgreement | None = None  # where there was real text, and weights got few bits

    def rows(self) -> list[tuple[str, str, str]]:
        rows = [
            (
                f"{self.precision}, largest difference to float32",
                f"{self.max_log_prob_difference:.2e}",
                "" if self.max_log_prob_allowed is None else f"<= {self.max_log_prob_allowed:g}",
            ),
            (
                f"{self.precision}, mean difference to float32",
                f"{self.mean_log_prob_difference:.2e}",
                f"<= {self.mean_log_prob_allowed:g}",
            ),
            (
                f"{self.precision}, same best beam, of {self.requests_compared}",
                f"{self.same_best_share:.2%}",
                f">= {self.same_best_required:.0%}",
            ),
        ]
        return rows if self.text is None else rows + self.text.rows(self.precision)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.mean_log_prob_difference))

    def problems(self) -> list[str]:
        if not self.is_finite:
            return ["its numbers overflow, and log-probabilities are NaN or infinite"]
        found = []
        allowed = np.inf if self.max_log_prob_allowed is None else self.max_log_prob_allowed
        if self.max_log_prob_difference > allowed:
            found.append(f"log-probabilities differ by up to {self.max_log_prob_difference:.3g}")
        if self.mean_log_prob_difference > self.mean_log_prob_allowed:
            found.append(f"log-probabilities differ by {self.mean_log_prob_difference:.3g} on average")
        if self.same_best_share < self.same_best_required:
            found.append(f"only {self.same_best_share:.0%} of the best beams are the same")
        return found if self.text is None else found + self.text.problems()


def compare(
    folder: Path,
    manifest: Manifest,
    lowered: Path,
    lowered_manifest: Manifest,
    precision: str,
    optimise: bool = True,
    text: Sequence[Case] = (),
) -> PrecisionCheck:
    """Greedy likes to be lucky; a beam of four sees near ties. The log-probabilities are those of what float32 says.
    `text` is real text, where there is any."""
    full, other = GraphRunner(folder, manifest), GraphRunner(lowered, lowered_manifest, optimise)
    width = min(_WIDTH, manifest.limits.max_beam_size)
    steps = min(_STEPS, manifest.limits.max_target_length - 1)
    cases = _random_cases(manifest, steps)
    expected, found = full.beams(cases, width, steps), other.beams(cases, width, steps)
    same = [a.sequences[0] == b.sequences[0] for a, b in zip(expected, found, strict=True)]
    said = [beams.sequences[0] for beams in expected]
    difference = np.abs(_teacher_forced(full, cases, said, steps) - _teacher_forced(other, cases, said, steps))
    largest, mean = _LIMITS[precision]
    return PrecisionCheck(
        precision,
        float(difference.max()),
        float(difference.mean()),
        sum(same) / len(same),
        len(same),
        largest,
        mean,
        _SAME_BEST[precision],
        _agreement(full, other, text, precision) if text and precision in _SAME_WORDS else None,
    )


def _agreement(full: GraphRunner, other: GraphRunner, cases: Sequence[Case], precision: str) -> TextAgreement:
    """Float32 writes; the other graphs are forced along the same words, and asked at each place for their best one.
    Behind a place where float32 would end, nothing is counted."""
    found: list[tuple[bool, bool]] = []  # of each word: the same, sure
    ordered = sorted(cases, key=lambda case: (len(case.source), len(case.prompt)))
    for begin in range(0, len(ordered), _TOGETHER):
        together = ordered[begin : begin + _TOGETHER]
        longest = max(len(case.prompt) for case in together)
        steps = max(1, min(_MOST_STEPS, full.manifest.limits.max_target_length - longest - 1))
        written, best, ahead = full.best_words(together, [()] * len(together), steps)
        _, others, _ = other.best_words(together, written, steps)
        for words, other_words, margins in zip(best, others, ahead, strict=True):
            for word, other_word, margin in zip(words, other_words, margins, strict=True):
                found.append((word == other_word, margin >= _SURE))
                if word in full.manifest.vocabulary.eos_ids:
                    break
    sure = [same for same, certain in found if certain]
    return TextAgreement(
        lines=len(cases),
        words=len(found),
        share=sum(same for same, _ in found) / len(found),
        required=_SAME_WORDS[precision],
        sure_words=len(sure),
        sure_share=sum(sure) / max(1, len(sure)),
        sure_required=_SAME_SURE_WORDS[precision] if len(sure) >= _FEWEST_SURE else 0.0,
    )


def _random_cases(manifest: Manifest, steps: int) -> list[Case]:
    chance = np.random.default_rng(2)
    vocabulary, limits = manifest.vocabulary, manifest.limits
    words = [word for word in range(vocabulary.source_size) if word != vocabulary.pad_id]

    def text(length: int) -> tuple[int, ...]:
        return tuple(chance.choice(words, length).tolist())

    if manifest.task == "generate":
        longest = min(limits.max_source_length, limits.max_target_length - steps)
        return [Case((), text(length)) for length in _LENGTHS if length <= longest]
    lengths = [length for length in _LENGTHS if length <= limits.max_source_length]
    if manifest.feature_width:
        grids = [chance.standard_normal((length, manifest.feature_width)).astype(np.float32) for length in lengths]
        return [Case(grid, (vocabulary.start_id,)) for grid in grids]
    return [Case(text(length), (vocabulary.start_id,)) for length in lengths]


def _teacher_forced(
    graphs: GraphRunner, cases: list[Case], said: list[tuple[int, ...]], steps: int
) -> NDArray[np.float32]:
    """[cases, steps]: of the words behind each prompt."""
    longest = max(map(len, said)) - 1
    targets = np.full((len(said), longest), graphs.manifest.vocabulary.pad_id, np.int64)
    labels = targets.copy()
    for row, sequence in enumerate(said):
        targets[row, : len(sequence) - 1] = sequence[:-1]
        labels[row, : len(sequence) - 1] = sequence[1:]
    found = graphs.token_log_probs(cases, targets, labels)
    return np.stack([found[row, len(sequence) - 1 - steps : len(sequence) - 1] for row, sequence in enumerate(said)])
