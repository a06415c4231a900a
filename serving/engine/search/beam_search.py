"""The host's half of the search, for one request: what has finished, and when to stop.

The device proposes (candidates) and goes on (beams); this follows, keeps the tree of what was produced, collects
finished hypotheses, and decides when nothing better can come. Exactly as Hugging Face `generate` does, greedy and beam.

Depth t of the tree holds the tokens that are the input of step t; depth 0 is the start token. A sequence that ends
with a candidate of step t has t + 2 tokens, the start token included. After a prompt, the start token is its last one;
what was before stands in the cache once, in front of the tree, for all beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Alternatives, FinishReason, Hypothesis, Piece, Trace
from beamline.serving.engine.search.trace import Proposal, Tracer

DEAD = -1e9  # what a beam carries that does not exist
_IMPOSSIBLE = DEAD / 2  # nothing real is ever below

Path = tuple[tuple[int, ...], tuple[float, ...], tuple[Alternatives, ...]]  # tokens, log-probabilities, alternatives


class StepView(NamedTuple):
    """One request's row of a step's outputs, as plain lists, which are its search's from then on. One is made for every
    request in every step: a tuple is made several times as fast as a frozen dataclass."""

    tokens: list[int]  # [width]
    parents: list[int]
    scores: list[float]
    candidate_scores: Sequence[float]  # [candidates_per_beam * width], best first
    candidate_tokens: Sequence[int]
    candidate_parents: Sequence[int]
    alternatives: Sequence[Alternatives] = ()  # of each beam that was the step's input


@dataclass(frozen=True, slots=True)
class _Ending:
    """A finished hypothesis: a beam of some depth, and the candidate that ended it."""

    score: float  # normalised by length
    depth: int
    beam: int
    token: int | None  # None: it was cut off without another token
    total: float  # not normalised
    reason: FinishReason


class BeamSearch:
    def __init__(
        self, options: DecodingOptions, start_token: int, eos_ids: Sequence[int], prompt_entries: int = 0
    ) -> None:
        self.options = options
        self.width = options.beam_size
        self.start_token = start_token
        self.done = False
        self._eos_ids = frozenset(eos_ids)
        self._prompt_length = 1 + len(options.prefix)
        # From the first of these depths on no word is forced; at all of them only the end token ends a hypothesis.
        self._free = range(max(len(options.prefix), options.forced_bos_id is not None), options.max_length - 3)
        self._endings: list[_Ending] = []  # best first, at most `width`
        # The tree, by depth: the token of each beam, its parent one depth up, its score.
        self._tokens = [[start_token] * self.width]
        self._parents = [list(range(self.width))]
        self._scores = [[0.0] + [DEAD] * (self.width - 1)]
        # Where each beam's keys and values stand in the cache; a depth is added when its step has run.
        self._entries: list[Sequence[int]] = []
        self._prompt_entries = prompt_entries
        self.used_entries = prompt_entries
        self.kept_entries = prompt_entries  # of what was used when dead branches were last looked for, what was alive
        self._stem = 0  # so many depths, from the root, have one entry each in the cache: all beams come from it
        self._alternatives: list[Sequence[Alternatives]] = []  # by depth: what each of its beams might have said next
        self.tracer = Tracer(options.trace_candidates) if options.trace_candidates else None

    # -- what the next step needs --------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """The number of the next step."""
        return len(self._tokens) - 1

    @property
    def generated(self) -> int:
        return max(0, len(self._tokens) - self._prompt_length)

    def forced_token(self, ahead: int = 0) -> int | None:
        """The word that the next step must produce, or the one that is so many steps further."""
        depth = len(self._tokens) - 1 + ahead
        if depth >= self._free.start:
            return None
        prefix = self.options.prefix
        return prefix[depth] if depth < len(prefix) else self.options.forced_bos_id

    def levels(self, depth: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Of the tree below a depth, level by level: each beam's parent, and its token."""
        return zip(self._parents[depth + 1 :], self._tokens[depth + 1 :], strict=True)

    # -- following the device ------------------------------------------------------------------------------------

    def advance(self, step: StepView) -> None:
        """Takes in what the step of this depth produced."""
        step_depth = self.depth
        if (
            step_depth in self._free
            and self.tracer is None
            and self._eos_ids.isdisjoint(step.candidate_tokens[: self.width])
        ):  # nearly every step
            self._append(step)
            self.done = self._nothing_better(step.scores[0], step_depth + 2 - self._prompt_length)
            return
        if self._must_end_now():
            return self._end_with_forced_eos()
        forced = self.forced_token() is not None
        if not forced:
            self._collect(step, step_depth)
        if self.tracer is not None:
            self.tracer.record(step_depth, self._forced_proposals(step) if forced else self._proposals(step), forced)
        self._append(step)
        if not self.done and self._must_end_now():
            self._end_with_forced_eos()
        elif not self.done and step_depth + 2 >= self.options.max_length:
            self._cut_off(FinishReason.LENGTH)  # only a forced word can get here

    def _append(self, step: StepView) -> None:
        """One depth more of the tree, and what the step has written to the cache: an entry for each beam."""
        self._alternatives.append(step.alternatives)
        self._tokens.append(step.tokens)
        self._parents.append(step.parents)
        self._scores.append(step.scores)
        end = self.used_entries + self.width
        self._entries.append(range(self.used_entries, end))
        self.used_entries = end

    def _collect(self, step: StepView, depth: int) -> None:
        at_limit = depth + 2 >= self.options.max_length
        length = depth + 2 - self._prompt_length
        new = []
        for rank in range(self.width):
            token = step.candidate_tokens[rank]
            ends = token in self._eos_ids
            total = step.candidate_scores[rank]
            if (ends or at_limit) and total > _IMPOSSIBLE:
                reason = FinishReason.EOS if ends else FinishReason.LENGTH
                parent = step.candidate_parents[rank]
                new.append(_Ending(self._normalise(total, length), depth, parent, token, total, reason))
        if new:
            self._keep_best(new)
        self.done = at_limit or self._nothing_better(step.scores[0], length)

    def _nothing_better(self, best_score: float, length: int) -> bool:
        options = self.options
        if len(self._endings) < self.width:
            return best_score <= _IMPOSSIBLE
        if self.width == 1 or options.early_stopping is True:
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = options.max_length - self._prompt_length
        return self._normalise(best_score, length) <= self._endings[-1].score

    def _must_end_now(self) -> bool:
        """Whether the next token is the last, and can only be the end token: then there is nothing left to compute."""
        return self.options.forced_eos_id is not None and self.depth + 2 >= self.options.max_length

    def _end_with_forced_eos(self) -> None:
        self._end_beams(self.options.forced_eos_id, FinishReason.LENGTH)

    def _cut_off(self, reason: FinishReason) -> None:
        self._end_beams(None, reason)

    def _end_beams(self, token: int | None, reason: FinishReason) -> None:
        """Ends the living beams as they are, with a token that costs nothing, or with none."""
        depth = self.depth
        length = max(1, depth + (1 if token is None else 2) - self._prompt_length)
        new = [
            _Ending(self._normalise(total, length), depth, beam, token, total, reason)
            for beam, total in enumerate(self._scores[depth])
            if total > _IMPOSSIBLE
        ]
        if self.tracer is not None:
            ends = [Proposal(token, each.beam, each.total, each.score, finish_reason=reason) for each in new]
            self.tracer.record(depth, ends, forced=token is not None)
        self._keep_best(new)
        self.done = True

    def stop(self, reason: FinishReason = FinishReason.TIME_LIMIT) -> None:
        """Time is over. A complete hypothesis is better than half a one, so the living beams only fill up."""
        finished, self._endings = self._endings, []
        self._cut_off(reason)
        self._endings = (finished + self._endings)[: self.width]

    def stop_one(self, index: int) -> None:
        """No more is wanted of a hypothesis: there is one search for all of them, so it ends."""
        self.stop(FinishReason.STOP)

    def _normalise(self, total: float, length: int) -> float:
        return float(total / length**self.options.length_penalty)

    def _keep_best(self, new: list[_Ending]) -> None:
        merged = sorted(self._endings + new, key=lambda ending: -ending.score)  # stable: the older one wins a tie
        self._endings = merged[: self.width]

    # -- the tree ------------------------------------------------------------------------------------------------

    def live_entries(self) -> list[int]:
        """The cache entries of the living beams' ancestors, in order."""
        kept: list[int] = []
        alive = {
            parent for parent, score in zip(self._parents[-1], self._scores[-1], strict=True) if score > _IMPOSSIBLE
        }
        for depth in range(len(self._entries) - 1, self._stem - 1, -1):
            entries, parents = self._entries[depth], self._parents[depth]
            kept.extend(entries[beam] for beam in alive)
            alive = {parents[beam] for beam in alive}
        return [*range(self._prompt_entries + self._stem), *sorted(kept)]

    def compacted(self, kept: Sequence[int]) -> None:
        """The cache now holds only these entries, in this order."""
        place = {entry: index for index, entry in enumerate(kept)}
        for depth in range(self._stem, len(self._entries)):
            self._entries[depth] = [place.get(entry, -1) for entry in self._entries[depth]]
        while self._stem < len(self._entries) and sum(entry >= 0 for entry in self._entries[self._stem]) == 1:
            self._stem += 1
        self.used_entries = self.kept_entries = len(kept)

    # -- streaming: what is certain already ----------------------------------------------------------------------------

    def new_pieces(self, known: Sequence[int]) -> list[Piece]:
        """What has become certain of the best hypothesis beyond its first `known[0]` tokens: what the living beams and
        the best of the finished ones have in common. Whichever of them wins, it begins so."""
        floor = self._prompt_length - 1 + known[0]
        alive = {beam for beam, score in enumerate(self._scores[-1]) if score > _IMPOSSIBLE}
        best = self._endings[0] if self._endings else None
        depth = self.depth
        if not alive or depth <= floor or (best is not None and best.depth <= floor):
            return []
        while len(alive) > 1 or (best is not None and best.depth < depth):
            alive = {self._parents[depth][beam] for beam in alive}
            depth -= 1
            if depth <= floor:
                return []
            if best is not None and best.depth == depth:
                alive.add(best.beam)
        return [Piece(0, *self._path(depth, alive.pop(), floor))]

    def _path(self, depth: int, beam: int, floor: int) -> Path:
        """The tokens of one path, from below `floor` down to a depth."""
        tokens, log_probs, alternatives = [], [], list[Alternatives]()
        for level in range(depth, floor, -1):
            parent = self._parents[level][beam]
            tokens.append(self._tokens[level][beam])
            log_probs.append(self._scores[level][beam] - self._scores[level - 1][parent])
            alternatives.extend(self._alternatives[level - 1][parent : parent + 1])
            beam = parent
        return tuple(tokens[::-1]), tuple(log_probs[::-1]), tuple(alternatives[::-1])

    # -- the trace -----------------------------------------------------------------------------------------------

    def _proposals(self, step: StepView) -> list[Proposal]:
        """The candidates of a step, as many as there are without wider neighbours in the batch."""
        depth = self.depth
        at_limit = depth + 2 >= self.options.max_length
        length = depth + 2 - self._prompt_length
        beams = {pair: beam for beam, pair in enumerate(zip(step.parents, step.tokens, strict=True))}
        count = max(2, 1 + len(self._eos_ids)) * self.width
        found = []
        for rank, token, parent in zip(range(count), step.candidate_tokens, step.candidate_parents, strict=False):
            total = step.candidate_scores[rank]
            if total <= _IMPOSSIBLE:
                break
            ends = token in self._eos_ids
            reason = FinishReason.EOS if ends else FinishReason.LENGTH
            finished = reason if rank < self.width and (ends or at_limit) else None
            beam = None if ends else beams.get((parent, token))
            found.append(Proposal(token, parent, total, self._normalise(total, length), beam, finished))
        return found

    def _forced_proposals(self, step: StepView) -> list[Proposal]:
        length = max(1, self.depth + 2 - self._prompt_length)
        return [
            Proposal(token, parent, score, self._normalise(score, length), beam)
            for beam, (token, parent, score) in enumerate(zip(step.tokens, step.parents, step.scores, strict=True))
            if score > _IMPOSSIBLE
        ]

    def trace(self) -> Trace | None:
        """What was not taken yet, and where the hypotheses end."""
        if self.tracer is None:
            return None
        ends = [end for end in self._ends_in(self.tracer) if end is not None]
        options = self.options
        return Trace(
            self.width, options.samples, options.length_penalty, self.tracer.take(), tuple(ends), self.tracer.truncated
        )

    def _ends_in(self, tracer: Tracer) -> list[tuple[int, int] | None]:
        best = self._endings[: self.options.num_hypotheses]
        return [tracer.end_of(ending.depth, ending.beam, ending.token) for ending in best]

    # -- the answer ----------------------------------------------------------------------------------------------

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The best ones, without start token and prefix."""
        return tuple(self._hypothesis(ending) for ending in self._endings[: self.options.num_hypotheses])

    def _hypothesis(self, ending: _Ending) -> Hypothesis:
        tokens, log_probs, alternatives = self._path(ending.depth, ending.beam, self._prompt_length - 1)
        if ending.token is not None:
            tokens = (*tokens, ending.token)
            log_probs = (*log_probs, ending.total - self._scores[ending.depth][ending.beam])
            if ending.depth < len(self._alternatives):  # a forced end has none
                alternatives = (*alternatives, *self._alternatives[ending.depth][ending.beam : ending.beam + 1])
        return Hypothesis(tokens, log_probs, ending.score, ending.reason, alternatives=alternatives)
