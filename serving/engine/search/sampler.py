"""The host's half of sampling: rows that each continue themselves, until each has ended.

The same tree as beam search has, whose branches never cross.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis, Piece
from beamline.serving.engine.search.beam_search import DEAD, BeamSearch, StepView
from beamline.serving.engine.search.random_numbers import Uniforms
from beamline.serving.engine.search.trace import Proposal, Tracer


class Sampler(BeamSearch):
    def __init__(
        self, options: DecodingOptions, start_token: int, eos_ids: Sequence[int], prompt_entries: int = 0
    ) -> None:
        super().__init__(options, start_token, eos_ids, prompt_entries)
        self._scores = [[0.0] * self.width]
        self._uniforms = [Uniforms(options.seed, sample) for sample in range(self.width)]
        self._ends: list[tuple[int, FinishReason] | None] = [None] * self.width  # at which depth, and why
        self._reported_end = [False] * self.width

    def draws(self, ahead: int = 0) -> list[tuple[int, float]]:
        """The samples that the next step shall draw, or the one that is so many steps further, each with its number;
        none while the prompt is forced."""
        if self.forced_token(ahead) is not None:
            return []
        position = self.depth + ahead - (self._prompt_length - 1)
        return [(sample, self._uniforms[sample].at(position)) for sample, end in enumerate(self._ends) if end is None]

    def advance(self, step: StepView) -> None:
        forced = self.forced_token() is not None
        # One that has ended is dead: what the device goes on writing for it is garbage.
        scores = [DEAD if end else score for end, score in zip(self._ends, step.scores, strict=True)]
        self._append(step._replace(parents=list(range(self.width)), scores=scores))
        if forced:
            if self.tracer is not None:
                self.tracer.record(self.depth - 1, self._drawn(step), forced=True)
            return
        for sample, token in enumerate(step.tokens):
            if token in self._eos_ids:
                self._end(sample, FinishReason.EOS)
            elif self.depth + 1 >= self.options.max_length or self._must_end_now():
                self._end(sample, FinishReason.LENGTH)
        if self.tracer is not None:
            self.tracer.record(self.depth - 1, self._drawn(step))

    def _drawn(self, step: StepView) -> list[Proposal]:
        """The samples that took part in the step that was just taken in."""
        length = max(1, self.depth + 1 - self._prompt_length)
        found = []
        for sample, end in enumerate(self._ends):
            if end is None or end[0] == self.depth:
                total = self._scores[self.depth][sample]
                reason = None if end is None else end[1]
                found.append(
                    Proposal(step.tokens[sample], sample, total, self._normalise(total, length), sample, reason)
                )
        return found

    def _ends_in(self, tracer: Tracer) -> list[tuple[int, int] | None]:
        return [tracer.last_of(sample) for sample in range(self.width)]

    def _end(self, sample: int, reason: FinishReason) -> None:
        self._ends[sample] = self._ends[sample] or (self.depth, reason)
        self.done = all(self._ends)

    def stop(self, reason: FinishReason = FinishReason.TIME_LIMIT) -> None:
        for sample in range(self.width):
            self._end(sample, reason)

    def stop_one(self, index: int) -> None:
        if index < self.width:
            self._end(index, FinishReason.STOP)

    def live_entries(self) -> list[int]:
        alive = [sample for sample, end in enumerate(self._ends) if end is None]
        kept = [entries[sample] for entries in self._entries for sample in alive]
        return [*range(self._prompt_entries), *sorted(kept)]

    def new_pieces(self, known: Sequence[int]) -> list[Piece]:
        pieces = []
        for sample, end in enumerate(self._ends):
            depth, reason = end or (self.depth, None)
            floor = self._prompt_length - 1 + known[sample]
            if depth > floor or (reason is not None and not self._reported_end[sample]):
                pieces.append(Piece(sample, *self._path(depth, sample, floor), reason))
                self._reported_end[sample] = reason is not None
        return pieces

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """In the order of the samples."""
        return tuple(self._sampled(sample, *end) for sample, end in enumerate(self._ends) if end is not None)

    def _sampled(self, sample: int, depth: int, reason: FinishReason) -> Hypothesis:
        tokens, log_probs, alternatives = self._path(depth, sample, self._prompt_length - 1)
        score = self._normalise(sum(log_probs), max(1, len(tokens)))
        return Hypothesis(tokens, log_probs, score, reason, alternatives=alternatives)
