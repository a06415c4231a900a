"""The shape of the next step: how wide, how long, and when dead branches are cut instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamline.serving.contract.backend import Backend, Shape
from beamline.serving.engine.plan import Plan
from beamline.serving.engine.sequence import Job

_STEPS_AHEAD = 4  # a longer bucket has room for at least so many more steps
_ROOMY = 0.75  # a cache fuller than this after compaction gets a longer bucket, not another compaction soon


@dataclass(frozen=True, slots=True)
class Copies:
    """What making room took."""

    relayouts: int
    compactions: int


class Room:
    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend = backend
        self._plan = plan
        self.shape = Shape(0, 0, 0, 0)

    def fit(self, active: Sequence[Job], coming: Sequence[Job], batch: int, kept: int) -> Copies:
        """Fits the arenas to a step of `batch` of these requests, and to those who will join them; the first `kept`
        slots hold something."""
        jobs = [*active, *coming]
        beams = max(job.search.width for job in jobs)
        needed = _needed(jobs, beams)
        compactions = 0
        if needed > self.shape.cache:
            compactions = sum(self._compact(slot, job, beams) for slot, job in enumerate(active))
            needed = _needed(jobs, beams)
        cache = self._cache_length(needed, beams, compacted=compactions > 0)
        shape = Shape(batch, beams, cache, self._source_length(jobs))
        relaid = shape != self.shape and self._backend.resize(shape, kept)
        self.shape = shape
        return Copies(int(relaid), compactions)

    def expect(self, active: Sequence[Job], coming: Sequence[Job]) -> bool:
        """Tells the device of prompts that will have their slots in a while; whether it had to do anything."""
        jobs = [*active, *coming]
        beams = max(job.search.width for job in jobs)
        cache = self._plan.cache_bucket(min(_needed(jobs, beams) + _STEPS_AHEAD * beams, self._plan.largest.cache))
        if cache <= self.shape.cache:
            return False
        return self._backend.expect(Shape(len(jobs), beams, cache, self._source_length(jobs)))

    def _cache_length(self, needed: int, beams: int, compacted: bool) -> int:
        current = self.shape.cache
        if needed > current or (compacted and needed > _ROOMY * current):
            return self._plan.cache_bucket(min(needed + _STEPS_AHEAD * beams, self._plan.largest.cache))
        wanted = self._plan.cache_bucket(needed)
        return wanted if 2 * wanted < current else current  # shrinking a little is not worth the copy

    def _source_length(self, jobs: Sequence[Job]) -> int:
        wanted = self._plan.source_bucket(max(job.source_length for job in jobs))
        current = self.shape.source
        return current if wanted < current <= 2 * wanted else wanted

    def _compact(self, slot: int, job: Job, beams: int) -> bool:
        """Keeps only the ancestors of living beams, where there is no room for another step."""
        search = job.search
        if search.width == 1 or search.used_entries + beams <= self.shape.cache:
            return False
        keep = search.live_entries()
        if len(keep) == search.used_entries:
            return False
        self._backend.compact(slot, keep)
        search.compacted(keep)
        return True


def _needed(jobs: Sequence[Job], beams: int) -> int:
    """A step writes all K entries of a row, also where a request has fewer beams."""
    return max(job.search.used_entries for job in jobs) + beams
