"""Capacity: what a model may use of the machine (slots, and lengths in buckets), and the shape of its next step.

Lengths come in buckets, so that few shapes occur and rows are rarely laid out anew. A cache that is full is compacted
(dead branches are cut) before it grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from beamline.serving.contract.backend import Backend, Shape
from beamline.serving.contract.manifest import Manifest
from beamline.serving.engine.request import Request
from beamline.serving.engine.search.beam_search import BeamSearch

_SMALLEST = 32


def buckets(limit: int) -> tuple[int, ...]:
    """32, 48, 64, 96, 128, ... and the limit itself: each at most half as long again as the one before."""
    sizes = []
    size = _SMALLEST
    while size < limit:
        sizes.append(size)
        if size * 3 // 2 < limit:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, limit)


@dataclass(frozen=True)
class Plan:
    slots: int
    max_beams: int
    cache_buckets: tuple[int, ...]
    source_buckets: tuple[int, ...]
    engines: int = 1  # that have these slots together

    @classmethod
    def of(cls, manifest: Manifest, slots: int, cache_entries: int | None = None) -> Plan:
        """`cache_entries`: what one request may come to need, where an operator says it."""
        limits = manifest.limits
        # The worst case: no two beams share anything. A step writes all K entries before it knows which of them matter.
        entries = limits.max_beam_size * (limits.max_target_length + 1)
        if cache_entries is not None:
            entries = min(entries, cache_entries + limits.max_beam_size)
        elif manifest.task == "generate":
            # A prompt stands once, and answers are mostly shorter: twice the context. Who may need more is refused.
            entries = min(entries, 2 * limits.max_target_length + limits.max_beam_size)
        sources = buckets(limits.max_source_length) if manifest.task == "translate" else (1,)
        return cls(slots, limits.max_beam_size, buckets(entries), sources)

    @property
    def largest(self) -> Shape:
        return Shape(self.slots, self.max_beams, self.cache_buckets[-1], self.source_buckets[-1])

    def cache_bucket(self, entries: int) -> int:
        return self.cache_buckets[bisect_left(self.cache_buckets, entries)]

    def source_bucket(self, length: int) -> int:
        if len(self.source_buckets) == 1:
            return self.source_buckets[0]
        return self.source_buckets[bisect_left(self.source_buckets, length)]

    def holds(self, entries: int) -> bool:
        """Whether a request that may come to need so many cache entries fits, beside the widest neighbour."""
        return entries <= self.most_entries

    @property
    def most_entries(self) -> int:
        return self.cache_buckets[-1] - self.max_beams

    def describe(self, reserved_bytes: int, taken_bytes: int) -> list[str]:
        """`taken_bytes`: what loading the model took of the host's memory."""
        shared = f" in {self.engines} engines" if self.engines > 1 else ""
        return [
            f"{self.slots} slots{shared}, up to {self.max_beams} beams each",
            f"cache lengths {_list(self.cache_buckets)}; source lengths {_list(self.source_buckets)}",
            f"{taken_bytes / 2**20:,.0f} MiB of memory taken by loading it; caches come on top as they are used, up to "
            f"{reserved_bytes / 2**20:,.0f} MiB if every slot held the widest and longest search",
        ]


def _list(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


_STEPS_AHEAD = 4  # a bucket that is changed to has room for at least so many more steps
_SPACIOUS = 0.75  # a cache fuller than this after compaction gets a longer bucket, not another compaction soon
_SHORTER = 0.75  # of the bucket that is: what a shorter one must save to be worth the copy
_GROWN = 16  # entries behind the last compaction, or half as many again as it left: some are dead by now


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
        searches = [request.search for request in requests]
        beams = max([search.width for search in searches])
        needed = _needed(searches, beams)
        full = needed > self.shape.cache
        length = self.shape.cache if full else self._length_if_compacted(searches, beams)
        compactions = 0
        if full or length < self.shape.cache:
            compactions = sum(
                self._compact(slot, request.search, length - beams) for slot, request in enumerate(active)
            )
            needed = _needed(searches, beams)
        cache = self._cache_length(needed, beams, compacted=full and compactions > 0)
        shape = Shape(batch, beams, cache, self._source_length(requests))
        relaid = self._backend.resize(shape, kept)
        self.shape = shape
        return Copies(int(relaid), compactions)

    def expect(self, active: Sequence[Request], coming: Sequence[Request]) -> bool:
        """Prepares the device for prompts that will have their slots in a while; whether it had to do anything."""
        requests = [*active, *coming]
        searches = [request.search for request in requests]
        beams = max(search.width for search in searches)
        cache = self._plan.cache_bucket(min(_needed(searches, beams) + _STEPS_AHEAD * beams, self._plan.largest.cache))
        if cache <= self.shape.cache:
            return False
        return self._backend.expect(Shape(len(requests), beams, cache, self._source_length(requests)))

    def _length_if_compacted(self, searches: Sequence[BeamSearch], beams: int) -> int:
        """What would be long enough if whoever has grown a lot were cut to what it had before: a step reads all of the
        cache, what is dead of it as well."""
        grown = max([min(search.used_entries, _worth_compacting(search)) for search in searches])
        return self._shorter(grown + beams, beams)

    def _shorter(self, needed: int, beams: int) -> int:
        """A bucket that is so much shorter than the one that is, and has room for some steps; else the one that is."""
        wanted = self._plan.cache_bucket(min(needed + _STEPS_AHEAD * beams, self._plan.largest.cache))
        return wanted if wanted <= _SHORTER * self.shape.cache else self.shape.cache

    def _cache_length(self, needed: int, beams: int, compacted: bool) -> int:
        current = self.shape.cache
        if needed > current or (compacted and needed > _SPACIOUS * current):
            return self._plan.cache_bucket(min(needed + _STEPS_AHEAD * beams, self._plan.largest.cache))
        return self._shorter(needed, beams)

    def _source_length(self, requests: Sequence[Request]) -> int:
        wanted = self._plan.source_bucket(max([request.source_length for request in requests]))
        current = self.shape.source
        return current if _SHORTER * current < wanted < current else wanted

    def _compact(self, slot: int, search: BeamSearch, most: int) -> bool:
        """Keeps only the ancestors of living beams, where there are more than so many entries."""
        if search.width == 1 or search.used_entries <= most:
            return False
        keep = search.live_entries()
        dead = search.used_entries - len(keep)
        if dead:
            self._backend.compact(slot, keep)
        search.compacted(keep)
        return dead > 0


def _worth_compacting(search: BeamSearch) -> int:
    """From so many entries on."""
    kept = search.kept_entries
    return kept + max(_GROWN, kept // 2)


def _needed(searches: Sequence[BeamSearch], beams: int) -> int:
    """A step writes all K entries of a row, also where a request has fewer beams."""
    return max([search.used_entries for search in searches]) + beams
