"""Which words translate which: IBM model 1 (Brown et al., 1993), in NumPy.

A target word comes from one of its sentence's source words, or from none; each source word has a distribution over what
it is translated with, and expectation maximisation finds the distributions that explain the text best. That is less
than an alignment needs, which also knows of order, and all that a lexical table does.

The table is sparse: only pairs that stand in a sentence together, and of these the likeliest after the first round.
A *link* is a source position and a target position of the same sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LONGEST = 100  # tokens; what is longer aligns badly, and costs its length squared
_LINKS = 2_000_000  # at once
_MERGE = 20_000_000  # pairs that are collected before they are summed up
_WIDEST = 1000  # pairs that a source word keeps after the first round


@dataclass(frozen=True)
class Sentences:
    """Many sentences in one array: that of number n is words[starts[n] : starts[n + 1]]."""

    words: Ints
    starts: Ints

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> Sentences:
        lengths = np.fromiter((len(each) for each in sentences), np.int64, len(sentences))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        words = np.fromiter((word for each in sentences for word in each), np.int64, int(starts[-1]))
        return cls(words, starts)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)


@dataclass(frozen=True)
class LexicalTable:
    """Pairs in the order of the source word, then of the target word."""

    source: Ints  # `null_word` for what no source word explains
    target: Ints
    probability: Floats  # of the target word, given the source word
    null_word: int

    def best(self, count: int, at_least: float) -> LexicalTable:
        """At most so many of each source word, the likeliest."""
        order = np.lexsort((-self.probability, self.source))
        kept = order[(_rank(self.source[order]) < count) & (self.probability[order] >= at_least)]
        kept.sort()
        return LexicalTable(self.source[kept], self.target[kept], self.probability[kept], self.null_word)


def learn(
    source: Sentences,
    target: Sentences,
    null_word: int,
    target_words: int,
    rounds: int = 5,
    advance: Callable[[int], None] = lambda sentences: None,
) -> LexicalTable:
    """`null_word` is the number behind the last source word; `advance` is told of sentences that have been read."""
    if rounds < 1:
        raise ValueError("a table needs at least one round")
    keys, counts = _first_round(source, target, null_word, target_words, advance)
    table = _normalised(keys, counts, null_word, target_words).best(_WIDEST, 0.0)
    for _ in range(rounds - 1):
        keys = table.source * target_words + table.target
        counts = np.zeros(len(keys))
        for links in _chunks(source, target, null_word, advance):
            pairs, which = np.unique(links.source * target_words + links.target, return_inverse=True)
            place = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
            known = keys[place] == pairs
            share = np.where(known, table.probability[place], 0.0)[which]
            share /= _sums(share, links)
            np.add.at(counts, place, np.where(known, _counted(which, share, len(pairs)), 0.0))
        table = _normalised(keys, counts, null_word, target_words)
    return table


@dataclass(frozen=True)
class _Links:
    source: Ints  # words
    target: Ints
    position: Ints  # which target position each belongs to, counted through the chunk


def _first_round(
    source: Sentences, target: Sentences, null_word: int, target_words: int, advance: Callable[[int], None]
) -> tuple[Ints, Floats]:
    """All source words of a sentence are equally likely still."""
    keys: list[Ints] = []
    counts: list[Floats] = []
    for links in _chunks(source, target, null_word, advance):
        pairs, which = np.unique(links.source * target_words + links.target, return_inverse=True)
        keys.append(pairs)
        counts.append(_counted(which, 1 / _sums(np.ones(len(which)), links), len(pairs)))
        if sum(map(len, keys)) > _MERGE:
            merged = _summed(keys, counts)
            keys, counts = [merged[0]], [merged[1]]
    return _summed(keys, counts)


def _summed(keys: Sequence[Ints], counts: Sequence[Floats]) -> tuple[Ints, Floats]:
    if not keys:
        return np.zeros(0, np.int64), np.zeros(0)
    pairs, which = np.unique(np.concatenate(keys), return_inverse=True)
    return pairs, _counted(which, np.concatenate(counts), len(pairs))


def _counted(groups: Ints, weights: Floats, size: int = 0) -> Floats:
    """The sum of each group's weights."""
    return np.bincount(groups, weights, size).astype(np.float64)


def _chunks(source: Sentences, target: Sentences, null_word: int, advance: Callable[[int], None]) -> Iterator[_Links]:
    sizes = np.cumsum((source.lengths + 1) * target.lengths)
    first = 0
    while first < len(sizes):
        done = int(sizes[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(sizes, done + _LINKS, side="right")))
        yield _links(source, target, null_word, first, end)
        advance(end - first)
        first = end


def _links(source: Sentences, target: Sentences, null_word: int, first: int, end: int) -> _Links:
    """Of sentences first..end-1: every target position with every source word, and with none."""
    words = target.words[target.starts[first] : target.starts[end]]
    sentence = np.repeat(np.arange(first, end), target.lengths[first:end])  # of each target position
    fan = source.lengths[sentence] + 1
    position = np.repeat(np.arange(len(words)), fan)
    within = np.arange(len(position)) - np.repeat(np.cumsum(fan) - fan, fan)
    none = within == source.lengths[sentence][position]
    index = np.where(none, 0, source.starts[sentence][position] + within)
    return _Links(np.where(none, null_word, source.words[index]), words[position], position)


def _sums(share: Floats, links: _Links) -> Floats:
    """Of each link's target position; never zero."""
    return np.maximum(_counted(links.position, share), np.finfo(np.float64).tiny)[links.position]


def _normalised(keys: Ints, counts: Floats, null_word: int, target_words: int) -> LexicalTable:
    source, target = np.divmod(keys, target_words)
    totals = _counted(source, counts, null_word + 1)
    probability = counts / np.maximum(totals, np.finfo(np.float64).tiny)[source]
    return LexicalTable(source, target, probability, null_word)


def _rank(groups: Ints) -> Ints:
    """How many of the same group stand before each; equal ones stand together."""
    if not len(groups):
        return groups
    first = np.concatenate([[True], groups[1:] != groups[:-1]])
    starts = np.flatnonzero(first)
    return np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
