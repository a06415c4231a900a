"""How many machines hold a percentile at a rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.arrivals import Poisson
from examples.capacity.balancing import policy
from examples.capacity.measured import Measured
from examples.capacity.simulation import Floats, simulate

_SIMULATED = 64  # machines at most: a larger fleet is that with its share of the calls, for balancers see no difference
_WARM_UP = 0.25  # of the simulated time: at its beginning all servers are idle


@dataclass(frozen=True, slots=True)
class Fleet:
    machines: int
    busy: float  # of what the machines could do with all slots taken
    latencies: Floats  # of the requests behind the warm-up

    def percentile(self, share: float) -> float:
        return float(np.quantile(self.latencies, share, method="inverted_cdf"))


def fleet(of: Measured, machines: int, rate: float, policy_name: str, seconds: float, seed: int = 0) -> Fleet:
    count = min(machines, _SIMULATED)
    arrivals = Poisson(rate * count / machines).times(seconds, seed)
    steps = np.random.default_rng([seed, 2]).choice(of.steps, len(arrivals))
    found = simulate(arrivals, steps, [of.machine] * count, policy(policy_name, [of.machine.slots] * count, seed))
    capacity = machines * of.machine.capacity(float(of.steps.mean()))
    return Fleet(machines, rate / capacity, found.latencies[arrivals >= _WARM_UP * seconds])


def smallest(of: Measured, rate: float, p99: float, policy_name: str, seconds: float, seed: int = 0) -> Fleet:
    """The smallest fleet that holds it."""
    alone = np.quantile(of.steps, 0.99) * of.machine.step(1) + of.machine.way_seconds
    if alone > p99:
        raise LoadTestError(
            f"no number of machines holds a 99th percentile of {p99:g} s: a request has {alone:.3g} s on an idle one"
        )
    too_few = math.ceil(rate / of.machine.capacity(float(of.steps.mean()))) - 1  # queues would grow for ever
    enough, found = too_few, None
    while found is None or found.percentile(0.99) > p99:
        too_few, enough = enough, max(enough + 1, math.ceil(1.25 * enough))
        found = fleet(of, enough, rate, policy_name, seconds, seed)
    while enough - too_few > max(1, enough // 100):  # to one percent
        middle = (enough + too_few) // 2
        tried = fleet(of, middle, rate, policy_name, seconds, seed)
        if tried.percentile(0.99) > p99:
            too_few = middle
        else:
            enough, found = middle, tried
    return found
