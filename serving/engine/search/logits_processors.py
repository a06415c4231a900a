"""Logits processors: what edits a model's scores before the search, as short lists of tokens per beam.

They live here once, for every model; the step graph only applies the lists. The semantics are those of the logits
processors of Hugging Face `generate`: n-gram blocking, repetition and other penalties, biases, forbidden words.

What a step costs does not grow with the prompt: each beam's list and history are its parent's, one token longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.search.beam_search import BeamSearch
from beamline.serving.engine.search.edits import FORBIDDEN, BeamEdits, EditList
from beamline.serving.engine.search.history import Beginning, History, as_bytes

_NEVER = -100.0  # a bias as low as this forbids


class _Beam:
    """What a beam's edits are made from."""

    __slots__ = ("edits", "history")

    def __init__(self, edits: EditList, history: History) -> None:
        self.edits = edits
        self.history = history

    def copy(self) -> _Beam:
        return _Beam(self.edits.copy(), self.history.copy())


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
        self._common = EditList(beginning.tokens if penalty != 1.0 else (), penalty)
        said = frozenset(beginning.tokens)
        for token, bias in self._bias.items():
            self._common.put(token, penalty if token in said else 1.0, bias)
        self._beams: list[_Beam] = []
        if self.looks_back:
            history = History(beginning, max((len(word) - 1 for word in words), default=0))
            self._beams = [_Beam(self._common.copy(), history.copy()) for _ in range(options.beam_size)]
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
        return [BeamEdits(beam.edits, self._forbidden(beam.history, ends)) for beam in self._beams]

    def _follow(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """One depth further down the tree. All copies are made before any of them is extended."""
        given: set[int] = set()
        beams = []
        for parent in parents:
            beams.append(self._beams[parent].copy() if parent in given else self._beams[parent])
            given.add(parent)
        for beam, token in zip(beams, tokens, strict=True):
            beam.history.extend(token)
            if self._edits_words:
                beam.edits.put(token, self.options.repetition_penalty, self._added(token, beam.history))
        self._beams = beams
        self._depth += 1

    def _added(self, token: int, history: History) -> float:
        """To the score of a token that the beam has said."""
        bias = self._bias.get(token, 0.0)
        if not self._lowers:
            return bias
        return bias - self.options.presence_penalty - history.counts[token] * self.options.frequency_penalty

    def _forbidden(self, history: History, ends: Sequence[int]) -> Sequence[int]:
        phrases = [last for before, last in self._phrases if history.ends_with(before)]
        forbidden = (*history.repeating(), *phrases, *ends)
        return tuple(dict.fromkeys(forbidden)) if forbidden else ()
