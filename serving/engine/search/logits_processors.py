"""Logits processors: what edits a model's scores before the search, as short lists of tokens per beam.

They live here once, for every model; the step graph only applies the lists. The semantics are those of the logits
processors of Hugging Face `generate`: n-gram blocking, repetition and other penalties, biases, forbidden words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from beamline.serving.contract.backend import Floats, Ints
from beamline.serving.engine.options import DecodingOptions

Edit = tuple[float, float]  # scale, add
NEUTRAL: Edit = (1.0, 0.0)
FORBIDDEN = float("-inf")
_NEVER = -100.0  # a bias as low as this forbids
_SIZES = (0, 4, 16, 64, 256, 1024, 4096)  # a list is padded to one of these, so that few shapes occur


class LogitsProcessors:
    """Those of one request."""

    def __init__(
        self,
        options: DecodingOptions,
        eos_ids: Sequence[int],
        always_suppressed: Iterable[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        """`before` stands before every sequence: a prompt without its last token, which is the start token."""
        self.options = options
        self.eos_ids = tuple(eos_ids)
        baked = frozenset(always_suppressed)  # the graph forbids these itself
        words = [word for word in options.bad_words if not (len(word) == 1 and word[0] in self.eos_ids)]
        suppressed = {*options.suppress_tokens, *(word[0] for word in words if len(word) == 1)} - baked
        self._static: dict[int, Edit] = {
            token: (1.0, FORBIDDEN if bias <= _NEVER else bias) for token, bias in options.logit_bias
        }
        self._static.update(dict.fromkeys(suppressed, (1.0, FORBIDDEN)))
        self._before = list(before)
        self._answer_from = 1 + len(options.prefix)
        self._phrases = [word for word in words if len(word) > 1]
        self.need_sequences = bool(
            self._phrases
            or options.no_repeat_ngram_size > 0
            or options.repetition_penalty != 1.0
            or options.presence_penalty
            or options.frequency_penalty
        )

    def edits(self, length: int, sequences: Sequence[Sequence[int]] | None) -> list[dict[int, Edit]]:
        """For sequences of this length (start token included), what to edit, per beam; an empty list for nothing.
        `sequences` is only looked at where `need_sequences`."""
        common = self._static
        if length < self.options.min_length:
            common = common | dict.fromkeys(self.eos_ids, (1.0, FORBIDDEN))
        if not self.need_sequences:
            return [common] * self.options.beam_size if common else []
        assert sequences is not None
        return [self._of_sequence(sequence, common) for sequence in sequences]

    def _of_sequence(self, sequence: Sequence[int], common: dict[int, Edit]) -> dict[int, Edit]:
        options = self.options
        edits: dict[int, Edit] = {}
        words = sequence
        if self._before:
            sequence = [*self._before, *sequence]
        if options.repetition_penalty != 1.0:
            edits.update(dict.fromkeys(sequence, (options.repetition_penalty, 0.0)))
        if options.presence_penalty or options.frequency_penalty:
            for token, count in Counter(words[self._answer_from :]).items():
                lower = options.presence_penalty + count * options.frequency_penalty
                edits[token] = (edits.get(token, NEUTRAL)[0], -lower)
        for token, (_, add) in common.items():
            scale, lower = edits.get(token, NEUTRAL)
            edits[token] = (scale, lower + add)
        forbidden = set(_repeated(sequence, options.no_repeat_ngram_size))
        for phrase in self._phrases:
            if tuple(sequence[-len(phrase) + 1 :]) == phrase[:-1]:
                forbidden.add(phrase[-1])
        edits.update(dict.fromkeys(forbidden, (1.0, FORBIDDEN)))
        return edits


def _repeated(sequence: Sequence[int], size: int) -> list[int]:
    """The words that would complete an n-gram that the sequence already has."""
    if size <= 0 or len(sequence) + 1 < size:
        return []
    if size > 1 and sequence.count(sequence[-1]) == 1:  # as mostly: what has come once ends no n-gram twice
        return []
    ending = tuple(sequence[len(sequence) - size + 1 :])
    return [
        sequence[start + size - 1]
        for start in range(len(sequence) - size + 1)
        if tuple(sequence[start : start + size - 1]) == ending
    ]


def as_arrays(rows: Sequence[Sequence[dict[int, Edit]]], beams: int) -> tuple[Ints, Floats, Floats]:
    """Lists of B requests, each per beam -> index, scale, add [B, K, E]. A short list is padded with its own first
    edit, because writing one word twice is only safe where both write the same."""
    longest = max((len(edits) for row in rows for edits in row), default=0)
    size = next((size for size in _SIZES if size >= longest), longest)
    shape = (len(rows), beams, size)
    index, scale, add = np.zeros(shape, np.int64), np.ones(shape, np.float32), np.zeros(shape, np.float32)
    if size == 0:
        return index, scale, add
    for number, row in enumerate(rows):
        for beam, edits in enumerate(row):
            if not edits:
                continue
            items = list(edits.items())
            items += [items[0]] * (size - len(items))
            index[number, beam] = [token for token, _ in items]
            scale[number, beam] = [edit[0] for _, edit in items]
            add[number, beam] = [edit[1] for _, edit in items]
    return index, scale, add
