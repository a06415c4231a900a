"""The load tester says when it was itself the bottleneck."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from beamline.loadtest.judgement.client_health import judge_client
from beamline.loadtest.load.arrivals import Poisson
from beamline.loadtest.load.worker_messages import WorkerHealth
from beamline.loadtest.load.worker_pool import StageOutcome
from beamline.loadtest.stage import StagePlan, stage_of
from tests.loadtest.doubles import records_of


def judged(cpu=0.5, loop_lag=1e-4, send_lag=1e-4, late=1.0, median=0.01, slowest=0.01, machine=0.5, requests=1000):
    """A share of the requests is sent with `send_lag`; most have the median latency, and 2 % the slowest."""
    worker = WorkerHealth(cpu_seconds=cpu * 10, wall_seconds=10, loop_lags=np.full(100, loop_lag))
    lags = np.where(np.arange(requests) < requests * late, send_lag, 0.0)
    latencies = np.where(np.arange(1000) < 20, slowest, median)
    return judge_client([worker] * (os.cpu_count() or 1), lags, latencies, machine)


def test_it_says_when_it_is_the_bottleneck():
    assert not judged().saturated
    assert "more --workers" in judged(cpu=0.95).reasons[0]
    assert "50.0 % of the requests were sent 3.00 ms late" in judged(send_lag=0.003).reasons[0]
    assert "1.00 % of the requests were sent 3.00 ms late" in judged(send_lag=0.003, late=0.02).reasons[0]
    assert "event loop" in judged(loop_lag=0.003).reasons[0]
    assert "99.0 % busy, 50.0 % with this tool" in judged(machine=0.99).reasons[0]
    assert not judged(machine=0.99, cpu=0.1).saturated  # with somebody else
    # Three milliseconds in half a second are nothing; some that are late may well be among the slowest ...
    assert not judged(send_lag=0.003, median=0.5, slowest=0.5).saturated
    assert not judged(send_lag=0.01, late=0.02, slowest=0.5).saturated
    # ... but not half of them, when half of the answers are fast.
    assert judged(send_lag=0.01, late=0.6, slowest=0.5).saturated


def test_a_few_late_requests_are_no_bottleneck():
    """p99 of 73 is the slowest one, and on a busy machine one of 73 is late."""
    assert not judged(send_lag=0.1, late=1 / 73, requests=73).saturated
    assert not judged(send_lag=0.1, late=4 / 73, requests=73).saturated
    assert (
        "6.85 % of the requests were sent 100 ms late or later"
        in judged(send_lag=0.1, late=10 / 73, requests=73).reasons
    )
    assert not judged(send_lag=0.1, requests=9).saturated  # too few to say anything
    assert not judged(requests=0).saturated


def test_a_busy_machine_is_said_once():
    worker = WorkerHealth(cpu_seconds=10.0 * (os.cpu_count() or 1), wall_seconds=20.0, loop_lags=np.full(10, 1e-4))
    times = np.linspace(0, 9.99, 1000)

    def told(cpu_seconds):
        health = replace(worker, cpu_seconds=cpu_seconds)
        outcome = StageOutcome(records_of(times, [0.01] * 1000), (health,), 0.0, 10.0, None)
        stage = stage_of(outcome, Poisson(100), StagePlan(10.0, 0.0, 0), None, 0.99)
        return [text for text in (*stage.notes, *stage.client.reasons) if "this machine's cores" in text]

    busy_with_us, busy_with_others = told(15.0 * (os.cpu_count() or 1)), told(0.1)
    assert len(busy_with_us) == len(busy_with_others) == 1
    assert "with this tool; a server on it waits for them" in busy_with_us[0]
