"""A record of the search, for those who ask for it: each step's candidates, what they continue, what became of them.

The search keeps its tree by beams; a trace names the parents by their place among the candidates of the step before, so
that it can be read without knowing what a beam is. It is bounded: where the next step would pass the limit, it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamline.serving.engine.outputs import Candidate, Fate, FinishReason, TraceStep


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate as the search knows it, by the beam that it continues, and the one that it becomes."""

    token: int | None
    parent_beam: int
    score: float
    normalized_score: float
    beam: int | None = None
    finish_reason: FinishReason | None = None


class Tracer:
    def __init__(self, most_candidates: int) -> None:
        self.truncated = False
        self._left = most_candidates
        self._new: list[TraceStep] = []
        self._at_beam: dict[int, int] = {}  # the candidate of the last step that each beam is
        self._ends: dict[tuple[int, int, int | None], tuple[int, int]] = {}  # by step, beam before it, and token
        self._last: dict[int, tuple[int, int]] = {}  # where each beam was last: a sample's end

    def record(self, number: int, proposals: Sequence[Proposal], forced: bool = False) -> None:
        self._left -= len(proposals)
        self.truncated = self.truncated or self._left < 0
        if self.truncated:
            return
        candidates = []
        at_beam: dict[int, int] = {}
        for place, each in enumerate(proposals):
            fate = Fate.PRUNED if each.beam is None else Fate.LIVE
            if each.finish_reason is not None:
                fate = Fate.FINISHED
                self._ends[number, each.parent_beam, each.token] = number, place
            if each.beam is not None:
                at_beam[each.beam] = place
                self._last[each.beam] = number, place
            parent = self._at_beam.get(each.parent_beam, 0)
            candidates.append(
                Candidate(each.token, parent, each.score, each.normalized_score, fate, each.finish_reason)
            )
        self._at_beam = at_beam
        self._new.append(TraceStep(number, tuple(candidates), forced))

    def end_of(self, number: int, parent_beam: int, token: int | None) -> tuple[int, int] | None:
        """Where a finished candidate stands; None where it came after the trace's end."""
        return self._ends.get((number, parent_beam, token))

    def last_of(self, beam: int) -> tuple[int, int] | None:
        return self._last.get(beam)

    def take(self) -> tuple[TraceStep, ...]:
        """The steps since the last time."""
        new, self._new = tuple(self._new), []
        return new
