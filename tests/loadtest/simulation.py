"""What the fake server does with a list of arrivals, computed instead of waited for.

Its engine goes in steps: whoever has arrived by the beginning of a step and finds a free slot takes part in it, all
steps take equally long, and an idle engine begins at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def latencies(arrivals: Sequence[float], steps: int, slots: int, step_seconds: float) -> NDArray[np.float64]:
    """From arrival to answer, for requests of `steps` steps each."""
    waiting: deque[int] = deque()
    active: list[list[int]] = []  # request, steps left
    found = np.zeros(len(arrivals))
    arrived = answered = 0
    now = 0.0
    while answered < len(arrivals):
        if not active and not waiting:
            now = max(now, arrivals[arrived])
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            waiting.append(arrived)
            arrived += 1
        while waiting and len(active) < slots:
            active.append([waiting.popleft(), steps])
        now += step_seconds
        for running in active:
            running[1] -= 1
            if not running[1]:
                found[running[0]] = now - arrivals[running[0]]
                answered += 1
        active = [running for running in active if running[1]]
    return found
