"""How sure a number is: the block bootstrap.

Neighbouring requests share a queue, so their latencies are alike, and an interval that takes them for independent is
far too narrow. Therefore the run is cut into blocks of time, and whole blocks are drawn again and again. What it can't
see is what differs between two runs but not within one (another machine, another day).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.load import histogram

Floats = NDArray[np.float64]

RESAMPLES = 2000
FEWEST_BLOCKS = 8  # with fewer, the spread between blocks says little


@dataclass(frozen=True, slots=True)
class Block:
    """What a stretch of time has to say: the requests that should have been sent in it."""

    seconds: float
    sent: int
    failed: int
    finished: int  # answers that came in it, whenever they were asked for
    latencies: dict[int, int]  # bucket -> count


class Resampled:
    """One stage, as it could also have been: each row of the results is one drawing of blocks."""

    def __init__(self, blocks: Sequence[Block], seed: int = 0, resamples: int = RESAMPLES) -> None:
        self.enough = len(blocks) >= FEWEST_BLOCKS
        rng = np.random.default_rng(seed)
        count = max(len(blocks), 1)
        # B blocks drawn from B spread a little less than they should; drawing B - 1 of them makes up for it.
        draws = rng.multinomial(max(count - 1, 1), np.full(count, 1 / count), size=resamples).astype(np.float64)
        used = sorted({bucket for block in blocks for bucket in block.latencies})
        column = {bucket: index for index, bucket in enumerate(used)}
        counts = np.zeros((count, len(used)))
        for row, block in enumerate(blocks):
            for bucket, number in block.latencies.items():
                counts[row, column[bucket]] = number
        self._values = histogram.middle(np.asarray(used, dtype=np.int64))
        self._counts = draws @ counts
        self._cumulated = np.cumsum(self._counts, axis=1)
        self._totals = draws @ np.array(
            [[block.seconds, block.sent, block.failed, block.finished] for block in blocks] or [[0.0] * 4]
        )

    def percentile(self, share: float) -> Floats:
        """NaN for a drawing without any answer."""
        if not len(self._values):
            return np.full(len(self._totals), np.nan)
        wanted = np.maximum(share * self._cumulated[:, -1:], 0.5)
        index = np.minimum((self._cumulated < wanted).sum(axis=1), len(self._values) - 1)
        return np.asarray(np.where(self._cumulated[:, -1] > 0, self._values[index], np.nan), dtype=np.float64)

    def mean(self) -> Floats:
        return _ratio(self._counts @ self._values, self._counts.sum(axis=1))

    def throughput(self) -> Floats:
        return _ratio(self._totals[:, 3], self._totals[:, 0])

    def failure_share(self) -> Floats:
        return _ratio(self._totals[:, 2], self._totals[:, 1])


def interval(samples: Floats, confidence: float = 0.95) -> tuple[float, float] | None:
    known = samples[~np.isnan(samples)]
    if not len(known) or len(known) < len(samples) / 2:
        return None
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _ratio(above: Floats, below: Floats) -> Floats:
    ratio: Floats = np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0)
    return ratio
