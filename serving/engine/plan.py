"""What one model may use of the machine: slots, and the lengths that its arenas take.

Lengths come in buckets, so that few shapes occur and rows are rarely laid out anew.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from beamline.serving.contract.backend import Shape
from beamline.serving.contract.manifest import Manifest

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
    def of(cls, manifest: Manifest, slots: int) -> Plan:
        limits = manifest.limits
        # The worst case: no two beams share anything. A step writes all K entries before it knows which of them matter.
        entries = limits.max_beam_size * (limits.max_target_length + 1)
        if manifest.task == "translate":
            return cls(slots, limits.max_beam_size, buckets(entries), buckets(limits.max_source_length))
        # A prompt stands once, and answers are mostly shorter: twice the context. Who may need more is refused.
        entries = min(entries, 2 * limits.max_target_length + limits.max_beam_size)
        return cls(slots, limits.max_beam_size, buckets(entries), (1,))

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

    def describe(self, reserved_bytes: int) -> list[str]:
        shared = f" in {self.engines} engines" if self.engines > 1 else ""
        return [
            f"{self.slots} slots{shared}, up to {self.max_beams} beams each",
            f"cache lengths {_list(self.cache_buckets)}; source lengths {_list(self.source_buckets)}",
            f"at most {reserved_bytes / 2**20:,.0f} MiB of caches; what is never touched is never used",
        ]


def _list(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))
