"""The words that the requests in a batch may say, and the rows of the output projection that belong to them.

Each request has a list of its own, and a mask holds it to that: what is likely among its words never depends on its
neighbours. Only the rows that are computed are those of all lists together. They are gathered anew when somebody comes
who needs others, or when those who need them are gone; not at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Ints
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.shortlist import Lexicon
from beamline.serving.rewrites.shortlist import MASK, POSITIONS, WORDS

_NOWHERE = 0  # the place of all words that are not in the list; nobody may choose it
_BLOCK = 64  # the list's length is a multiple of this, which matrix kernels like
_WIDEST_SELECTION = 1024  # a step graph may select as many words as this, where the vocabulary has them
_WASTEFUL = 2  # a list that is so many times longer than needed is cut

Gather = Callable[[Ints], Mapping[str, NDArray[Any]]]


class Shortlist:
    def __init__(self, lexicon: Lexicon, manifest: Manifest, slots: int, gather: Gather) -> None:
        """`gather` returns the rows of some words, by the names of the step graph's inputs."""
        vocabulary = manifest.vocabulary
        self._lexicon = lexicon
        self._eos_ids = vocabulary.eos_ids
        self._filler = vocabulary.pad_id
        self._gather = gather
        self._shortest = min(vocabulary.target_size, _WIDEST_SELECTION)
        self._allowed = np.zeros((slots, vocabulary.target_size), np.bool_)
        self._count = 0  # of the words that are gathered now
        self._rows: Mapping[str, NDArray[Any]] = {}
        self._words: Ints = np.zeros(0, np.int64)
        self._positions: Ints = np.full(vocabulary.target_size, _NOWHERE, np.int64)
        self._stale = True
        self.gathered = 0  # how often

    def place(self, slot: int, source: Sequence[int], wanted: Sequence[int]) -> None:
        words = (*self._eos_ids, *wanted)
        self._allowed[slot] = self._lexicon.allowed(source, words, len(self._positions))
        self._stale = True

    def move(self, source: int, target: int) -> None:
        self._allowed[target] = self._allowed[source]
        self._stale = True

    def changed(self, batch: int, anyway: bool) -> dict[str, NDArray[Any]] | None:
        """The step graph's inputs for slots 0..batch-1, where they are not what they were."""
        if not self._stale and not anyway:
            return None
        allowed = self._allowed[:batch]
        needed = allowed.any(axis=0)
        count = int(np.count_nonzero(needed))
        missing = bool((needed & (self._positions == _NOWHERE)).any())
        if missing or not self._rows or self._count > _WASTEFUL * count:
            self._take(np.flatnonzero(needed))
        self._stale = False
        mask = np.full((batch, 1, len(self._words)), -np.inf, np.float32)
        listed = slice(1, 1 + self._count)
        mask[:, 0, listed][allowed.take(self._words[listed], axis=1)] = 0
        return {WORDS: self._words, POSITIONS: self._positions, MASK: mask, **self._rows}

    def _take(self, words: Ints) -> None:
        """In the order of their numbers: a sample is found along this axis, in the same order for every batch."""
        self._count = len(words)
        length = -(-max(1 + self._count, self._shortest) // _BLOCK) * _BLOCK
        self._words = np.full(length, self._filler, np.int64)
        self._words[1 : 1 + self._count] = words
        self._positions = np.full(len(self._positions), _NOWHERE, np.int64)
        self._positions[words] = np.arange(1, 1 + self._count)
        self._rows = self._gather(self._words)
        self.gathered += 1
