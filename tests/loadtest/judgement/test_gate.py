"""Gates and SLOs: what they mean, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.judgement.gate import parse_gate, parse_slo, shares_of
from beamline.loadtest.quantities import parse_duration, parse_share
from tests.loadtest.doubles import records_of, stage_from


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_duration, "500", "'500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
        (parse_share, "1", "'1' needs a unit; write 1%"),
        (parse_gate, "p95>500", "--fail-if 'p95>500': '500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
        (parse_gate, "errors>1", "--fail-if 'errors>1': '1' needs a unit; write 1%"),
        (parse_gate, "errors>0.01", "--fail-if 'errors>0.01': '0.01' needs a unit; write 0.01%"),
        (parse_slo, "p95=500", "--slo 'p95=500': '500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
    ],
)
def test_a_number_without_its_unit_is_refused(parse, text, sentence):
    """It would pass, silently, as something else."""
    with pytest.raises(LoadTestError, match=f"^{re.escape(sentence)}$"):
        parse(text)


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        ("p95>500ms", False),
        ("p95>10ms", True),
        ("p95 >= 10ms", True),
        ("p97.5>1ms", True),
        ("mean<1s", True),
        ("max>1h", False),
        ("throughput<100", False),
        ("throughput<1000/s", True),
        ("errors>1%", False),
        ("errors>=0", True),
        ("first_token_p95>1s", True),  # nothing streamed: it can't be promised
        ("rate<5", True),  # nothing searched
    ],
)
def test_gates(expression, fails):
    gate = parse_gate(expression)
    records = records_of(np.linspace(0, 9.99, 2000), np.random.default_rng(0).exponential(0.05, 2000))
    stage = stage_from(records, 200, 10)
    assert gate.check(stage, None).failed is fails


def test_percentiles_that_gates_name_are_measured():
    gates = [parse_gate("p97.5>1ms"), parse_gate("errors>1%")]
    assert shares_of(gates, parse_slo("p90=1s")) == {0.975, 0.9}
    few = stage_from(records_of([1, 2, 3], [0.1, 0.2, 0.3]), 1, 10)
    found = gates[0].check(few, None)
    assert found.failed  # what the report does not print is not judged either
    assert found.measured == "nothing: p97.5 takes at least 40 requests, and there are 3"
    unsearched = parse_gate("rate<5").check(few, None)
    assert (unsearched.failed, unsearched.measured) == (True, "nothing: only --slo searches for a rate")


@pytest.mark.parametrize(
    "text",
    [
        "p95",
        "p0>1s",
        "p100>1s",
        "speed>3",
        "p95=1s",
        "errors>many",
        "errors>nan%",
        "throughput<nan",
        "first_token_errors>1%",
    ],
)
def test_wrong_gates_are_refused(text):
    with pytest.raises(LoadTestError):
        parse_gate(text)
