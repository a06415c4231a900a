"""The uniform numbers that samples are drawn with: a function of seed, sample and position, and of nothing else.

So an answer does not depend on who else is in the batch, or on when it joined.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 64
_BITS = 24  # what a float32 below 1 can hold; and so the product with a total is below the total


class Uniforms:
    """The numbers of one sample: a counter-based generator whose key is the seed and the sample's number."""

    def __init__(self, seed: int, sample: int) -> None:
        self._generator = np.random.Philox(key=np.array([seed, sample], np.uint64))
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        while position >= len(self._numbers):
            raw = self._generator.random_raw(_BLOCK) >> np.uint64(64 - _BITS)
            self._numbers += (raw.astype(np.float64) / 2**_BITS).tolist()
        return self._numbers[position]
