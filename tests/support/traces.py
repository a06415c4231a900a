"""What a trace says, recomputed from nothing but the trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from beamline.serving.engine.outputs import Candidate, Fate, FinishReason, Trace, TraceStep


@dataclass(frozen=True)
class Replayed:
    tokens: tuple[int, ...]  # from the first step on, forced ones too
    score: float
    finish_reason: FinishReason | None


def path(steps: Sequence[TraceStep], step: int, place: int) -> list[Candidate]:
    """From the first step to this candidate."""
    found = []
    for number in range(step, -1, -1):
        assert steps[number].number == number
        candidate = steps[number].candidates[place]
        found.append(candidate)
        place = candidate.parent
    return found[::-1]


def replayed(trace: Trace, steps: Sequence[TraceStep]) -> list[Replayed]:
    """The hypotheses that the trace names."""
    found = []
    for step, place in trace.ends:
        way = path(steps, step, place)
        tokens = tuple(each.token for each in way if each.token is not None)
        found.append(Replayed(tokens, way[-1].normalized_score, way[-1].finish_reason))
    return found


def best_finished(trace: Trace, steps: Sequence[TraceStep]) -> list[tuple[int, int]]:
    """The hypotheses that a reader would choose: the best of those that finished, the older one at a tie."""
    finished = [
        (-candidate.normalized_score, step.number, place)
        for step in steps
        for place, candidate in enumerate(step.candidates)
        if candidate.fate is Fate.FINISHED
    ]
    return [(step, place) for _, step, place in sorted(finished)[: trace.width]]


def check_shape(trace: Trace, steps: Sequence[TraceStep], most_per_beam: int = 2) -> None:
    """Every candidate continues one that went on; as many go on as there are beams, at most."""
    for before, step in itertools.pairwise(steps):
        for candidate in step.candidates:
            parent = before.candidates[candidate.parent]
            assert parent.fate is Fate.LIVE
            assert candidate.score <= parent.score + 1e-4
    for step in steps:
        assert len(step.candidates) <= most_per_beam * trace.width
        assert sum(candidate.fate is Fate.LIVE for candidate in step.candidates) <= trace.width
        if not trace.samples:
            scores = [candidate.score for candidate in step.candidates]
            assert scores == sorted(scores, reverse=True)
