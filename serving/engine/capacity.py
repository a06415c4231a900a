"""Capacity: the shape of the next step (how wide, how long), and when dead branches are cut instead of growing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamline.serving.contract.backend import Backend, Shape
from beamline.serving.engine.plan import Plan
from beamline.serving.engine.request import Request

_STEPS_AHEAD = 4  # a longer bucket has room for at least so many more steps
_SPACIOUS = 0.75  # a cache fuller than this after compaction gets a longer bucket, not another compaction soon


@dataclass(frozen=True, slots=True)
class Copies:
    """What it took to fit a step."""

    relayouts: int
    compactions: int


class Capacity:
    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend = backend
        self._plan = plan
        self.shape = Shape(0, 0, 0, 0)

    def fit(self, active: Sequence[Request], coming: Sequence[Request], batch: int, kept: int) -> Copies:
        """Fits the arenas to a step of `batch` of these requests, and to those who will join them; the first `kept`
        slots hold something."""
        requests = [*active, *coming]
        beams = max(request.search.width for request in requests)
        needed = _needed(requests, beams)
        compactions = 0
        if needed > self.shape.cache:
            compactions = sum(self._compact(slot, request, beams) for slot, request in enumerate(active))
            needed = _needed(requests, beams)
        cache = self._cache_length(needed, beams, compacted=compactions > 0)
        shape = Shape(batch, beams, cache, self._source_length(requests))
        relaid = shape != self.shape and self._backend.resize(shape, kept)
        self.shape = shape
        return Copies(int(relaid), compactions)

    def expect(self, active: Sequence[Request], coming: Sequence[Request]) -> bool:
        """Prepares the device for prompts that will have their slots in a while; whether it had to do anything."""
        requests = [*active, *coming]
        beams = max(request.search.width for request in requests)
        cache = self._plan.cache_bucket(min(_needed(requests, beams) + _STEPS_AHEAD * beams, self._plan.largest.cache))
        if cache <= self.shape.cache:
            return False
        return self._backend.expect(Shape(len(requests), beams, cache, self._source_length(requests)))

    def _cache_length(self, needed: int, beams: int, compacted: bool) -> int:
        current = self.shape.cache
        if needed > current or (compacted and needed > _SPACIOUS * current):
            return self._plan.cache_bucket(min(needed + _STEPS_AHEAD * beams, self._plan.largest.cache))
        wanted = self._plan.cache_bucket(needed)
        return wanted if 2 * wanted < current else current  # shrinking a little is not worth the copy

    def _source_length(self, requests: Sequence[Request]) -> int:
        wanted = self._plan.source_bucket(max(request.source_length for request in requests))
        current = self.shape.source
        return current if wanted < current <= 2 * wanted else wanted

    def _compact(self, slot: int, request: Request, beams: int) -> bool:
        """Keeps only the ancestors of living beams, where there is no room for another step."""
        search = request.search
        if search.width == 1 or search.used_entries + beams <= self.shape.cache:
            return False
        keep = search.live_entries()
        if len(keep) == search.used_entries:
            return False
        self._backend.compact(slot, keep)
        search.compacted(keep)
        return True


def _needed(requests: Sequence[Request], beams: int) -> int:
    """A step writes all K entries of a row, also where a request has fewer beams."""
    return max(request.search.used_entries for request in requests) + beams
