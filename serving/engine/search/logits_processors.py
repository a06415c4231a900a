"""Logits processors: what edits a model's scores before the search, as short lists of tokens per beam.

They live here once, for every model; the step graph only applies the lists. The semantics are those of the logits
processors of Hugging Face `generate`: n-gram blocking, repetition and other penalties, biases, forbidden words.

What a step costs does not grow with the prompt: what a beam has said, and its list, are its parent's, one token longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.search.beam_search import BeamSearch
from beamline.serving.engine.search.edits import FORBIDDEN, BeamEdits, EditList
from beamline.serving.engine.search.history import ID_BYTES, Beginning, as_bytes

_NEVER = -100.0  # a bias as low as this forbids
_NO_EDITS = EditList()  # never added to


class LogitsProcessors:
    """Those of one request."""

    def __init__(
        self,
        options: DecodingOptions,
        eos_ids: Sequence[int],
        beginning: Beginning,
        always_suppressed: Iterable[int] = (),
    ) -> None:
        """`beginning` is what every sequence begins with: a prompt, or the start token, and a forced prefix."""
        self.options = options
        self.eos_ids = tuple(eos_ids)
        baked = frozenset(always_suppressed)  # the graph forbids these itself
        words = [word for word in options.bad_words if not (len(word) == 1 and word[0] in self.eos_ids)]
        suppressed = {*options.suppress_tokens, *(word[0] for word in words if len(word) == 1)} - baked
        self._bias = {token: FORBIDDEN if bias <= _NEVER else bias for token, bias in options.logit_bias}
        self._bias.update(dict.fromkeys(suppressed, FORBIDDEN))
        self._phrases = [(as_bytes(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._lowers = bool(options.presence_penalty or options.frequency_penalty)
        self._edits_words = options.repetition_penalty != 1.0 or self._lowers
        # Whether edits depend on the tokens that came before: then a step waits for the one before it.
        self.looks_back = bool(self._phrases or options.no_repeat_ngram_size > 0 or self._edits_words)
        penalty = options.repetition_penalty
        self._common = _NO_EDITS
        if self._edits_words or self._bias:
            self._common = EditList(beginning.tokens if penalty != 1.0 else (), penalty)
        said = frozenset(beginning.tokens)
        for token, bias in self._bias.items():
            self._common.put(token, penalty if token in said else 1.0, bias)
        # Of each beam, where something looks back: what it has said, behind the beginning's last tokens. And where that
        # edits words, its list, and how often it has said each token.
        self._beginning = beginning
        tail = beginning.tail(max((len(word) - 1 for word in words), default=0))
        self._said = [tail] * options.beam_size
        self._lists: list[tuple[EditList, dict[int, int]]] = []
        if self._edits_words:
            self._lists = [(self._common.copy(), {}) for _ in range(options.beam_size)]
        # Of all processors only those that forbid n-grams.
        self._only_repeats = not (self._edits_words or self._phrases or self._common.size)
        self._depth = len(options.prefix)  # of the tree, up to which the beams have followed it

    def edits(self, search: BeamSearch, ahead: int = 0) -> list[BeamEdits]:
        """What the next step edits, per beam, or the one so many steps further, where nothing `looks_back`; an empty
        list for nothing."""
        depth = search.depth + ahead
        if depth < len(self.options.prefix):  # what comes next is forced, whatever it scores
            return []
        ends = self.eos_ids if depth + 1 < self.options.min_length else ()
        if not self.looks_back:
            return [BeamEdits(self._common, ends)] * self.options.beam_size if ends or self._common.size else []
        for parents, tokens in search.levels(self._depth):
            self._follow(parents, tokens)
        if self._only_repeats and not (ends or self._beginning.repeats(self._said)):
            return []
        forbidden = [self._forbidden(said, ends) for said in self._said]
        if self._edits_words:
            return [BeamEdits(edits, each) for (edits, _), each in zip(self._lists, forbidden, strict=True)]
        return [BeamEdits(self._common, each) for each in forbidden] if self._common.size or any(forbidden) else []

    def _follow(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """One depth further down the tree."""
        added = as_bytes(tokens)
        self._said = [
            self._said[parent] + added[ID_BYTES * beam : ID_BYTES * (beam + 1)] for beam, parent in enumerate(parents)
        ]
        if self._edits_words:
            self._follow_lists(parents, tokens)
        self._depth += 1

    def _follow_lists(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """A parent's first child takes its list over. All copies are made before any of them is extended."""
        given: set[int] = set()
        lists = []
        for parent in parents:
            edits, counts = self._lists[parent]
            lists.append((edits.copy(), counts.copy()) if parent in given else (edits, counts))
            given.add(parent)
        for (edits, counts), token in zip(lists, tokens, strict=True):
            counts[token] = counts.get(token, 0) + 1
            edits.put(token, self.options.repetition_penalty, self._added(token, counts[token]))
        self._lists = lists

    def _added(self, token: int, count: int) -> float:
        """To the score of a token that the beam has said so often."""
        bias = self._bias.get(token, 0.0)
        if not self._lowers:
            return bias
        return bias - self.options.presence_penalty - count * self.options.frequency_penalty

    def _forbidden(self, said: bytes, ends: Sequence[int]) -> Sequence[int]:
        repeating = self._beginning.repeating(said)
        if not (repeating or self._phrases or ends):
            return ()
        phrases = [last for before, last in self._phrases if said.endswith(before)]
        return tuple(dict.fromkeys((*repeating, *phrases, *ends)))
