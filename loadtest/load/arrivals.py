"""When requests are sent.

Open loop: the times are drawn before the run and kept whatever the server does, as independent users would. Closed
loop: a fixed number of clients, each of which waits for its answer before it sends again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.errors import LoadTestError

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    rate: float

    def times(self, duration: float, seed: int) -> Times:
        return np.arange(round(self.rate * duration), dtype=np.float64) / self.rate

    def __str__(self) -> str:
        return f"constant, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: the gaps are exponential."""

    rate: float

    def times(self, duration: float, seed: int) -> Times:
        rng = np.random.default_rng([seed, 1])
        return _poisson(rng, self.rate, duration)

    def __str__(self) -> str:
        return f"Poisson, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Bursty:
    """Poisson while on, nothing while off. `rate` is the mean over both, so that runs can be compared."""

    rate: float
    on: float
    off: float

    def times(self, duration: float, seed: int) -> Times:
        rng = np.random.default_rng([seed, 2])
        period = self.on + self.off
        whole, rest = divmod(duration, period)
        time_on = whole * self.on + min(rest, self.on)
        # Time that only passes while on, with the pauses put back in afterwards.
        busy = _poisson(rng, self.rate * period / self.on, time_on)
        return busy + np.floor(busy / self.on) * self.off

    def __str__(self) -> str:
        return f"bursts of {self.on:g} s every {self.on + self.off:g} s, {self.rate:g}/s in the mean"


@dataclass(frozen=True, slots=True)
class Replay:
    """The times of a trace, `speed` times as fast. What lies after the run's end is not sent."""

    trace: tuple[float, ...]
    speed: float = 1.0

    def times(self, duration: float, seed: int) -> Times:
        times = np.sort(np.asarray(self.trace, dtype=np.float64)) / self.speed
        return times[times < duration]

    def __str__(self) -> str:
        return f"replay of {len(self.trace)} requests, {self.speed:g} times as fast"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    clients: int
    think: float = 0.0  # seconds between an answer and the client's next question

    def __str__(self) -> str:
        return f"closed loop, {self.clients} clients" + (f", {self.think:g} s to think" if self.think else "")


Arrivals = Constant | Poisson | Bursty | Replay | ClosedLoop
WithRate = Constant | Poisson | Bursty


def at_rate(arrivals: Arrivals, rate: float) -> WithRate:
    """The same process at another rate."""
    if isinstance(arrivals, Replay | ClosedLoop):
        raise LoadTestError(f"the rate of this can't be chosen: {arrivals}")
    return replace(arrivals, rate=rate)


def offered_rate(arrivals: Arrivals) -> float | None:
    return arrivals.rate if isinstance(arrivals, Constant | Poisson | Bursty) else None


def _poisson(rng: np.random.Generator, rate: float, duration: float) -> Times:
    """Given their number, the arrivals of a Poisson process are independent and uniform."""
    return np.sort(rng.uniform(0, duration, rng.poisson(rate * duration)))
