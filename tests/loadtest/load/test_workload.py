"""Request n of a seed is always the same, and mixes keep their weights."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from beamline.loadtest.load.texts import Fixed, Lognormal, SyntheticTexts
from beamline.loadtest.load.workload import Mix, MixedWorkload


def mixed(texts, seed=0) -> MixedWorkload:
    models = Mix(("a", "b"), (3.0, 1.0))
    options = Mix(((), (("beam_size", "4"),)), (1.0, 1.0))
    return MixedWorkload(texts, models, options, seed)


def test_a_request_is_the_same_whoever_sends_it():
    """Another process asks for other requests, in another order, from a copy."""
    first = mixed(SyntheticTexts(Lognormal(40, 0.5), seed=5), seed=5)
    requests = [first.request(number) for number in range(6000)]
    copy = pickle.loads(pickle.dumps(first))
    assert [copy.request(number) for number in range(5999, -1, -7)] == requests[5999::-7]


def test_another_seed_is_another_workload():
    texts = [mixed(SyntheticTexts(Lognormal(40, 0.5), seed), seed).request(0).text for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_mixes_keep_their_weights():
    workload = mixed(SyntheticTexts(Fixed(5), 0))
    requests = [workload.request(number) for number in range(8000)]
    assert Counter(request.model for request in requests)["a"] == pytest.approx(6000, rel=0.05)
    assert Counter(request.options for request in requests)[()] == pytest.approx(4000, rel=0.05)
    assert len(workload.kinds()) == 4
