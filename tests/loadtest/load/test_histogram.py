"""Buckets of the latency histogram are narrow enough for percentiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.loadtest.load import histogram


@given(st.floats(2e-6, 3000.0))
def test_a_bucket_is_never_far_off(seconds):
    found = float(histogram.middle(histogram.bucket(seconds)))
    assert found == pytest.approx(seconds, rel=0.006)
    assert histogram.buckets(np.array([seconds])).tolist() == [histogram.bucket(seconds)]


def test_a_histogram_gives_percentiles():
    values = np.random.default_rng(0).lognormal(-3, 1, 10_000)
    counts = dict(zip(*np.unique(histogram.buckets(values), return_counts=True), strict=True))
    for share in (0.01, 0.5, 0.95, 0.999):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert histogram.percentile(counts, share) == pytest.approx(exact, rel=0.006)
    assert histogram.percentile({}, 0.5) is None
