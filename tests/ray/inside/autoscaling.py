"""From one replica to two when requests wait, and back when they don't, by `ByLoad`; no call fails for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.inside.callers import Callers
from tests.ray.inside.cluster import cluster, deploy, replicas
from tests.support.processes import eventually

SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "policy": {"policy_function": "beamline.ray.scaling:ByLoad", "policy_kwargs": {"target_utilization": 0.8}},
}


@pytest.fixture(scope="module", autouse=True)
def application() -> Iterator[None]:
    with cluster():
        deploy({"fake": True, "fake_step_ms": 20, "fake_slots": 8}, autoscaling_config=SCALING)
        yield


def test_as_many_replicas_as_the_load_needs() -> None:
    """Few calls, but each with many sequences: Ray's own policy would count two calls for a replica, and be content."""
    assert replicas() == 1
    with Callers(unary=2, sequences=16) as heavy:
        eventually(lambda: replicas() == 2, "another one has come")
    with Callers(unary=2, streams=1) as light:  # for which one is enough
        eventually(lambda: replicas() == 1, "it has gone")
    for callers in (heavy, light):
        assert {each for each in callers.outcomes if not each.endswith(" OK")} == set()
        assert callers.outcomes["unary OK"] > 5
