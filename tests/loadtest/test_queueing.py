"""What is measured is what a queue with a known service time must give."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from beamline.loadtest.load.arrivals import Poisson
from beamline.loadtest.report.document import Stage, read
from examples.capacity.simulation import latencies
from tests.loadtest.doubles import latency_of
from tests.support.processes import PATIENCE, ROOT, beamline, environment, eventually, run_beamline, serving

LENGTH = 3
STEPS = LENGTH + 1  # one for every byte, and one for the end


def percentile(stage: Stage, share: float) -> float:
    return next(each.seconds for each in latency_of(stage).percentiles if each.share == share)


def test_the_simulation_agrees_with_theory():
    """M/D/1: with very short steps, waiting is what Pollaczek and Khinchine say."""
    load, service = 0.6, 1.0
    runs = [Poisson(load / service).times(20_000, seed) for seed in range(6)]
    waits = np.concatenate([latencies(arrivals.tolist(), 25, 1, service / 25) - service for arrivals in runs])
    # Who comes in the middle of a step waits for its end: half a step, in the mean, while the server is busy.
    assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.04)


def test_the_simulation_goes_in_steps():
    found = latencies([0.0, 0.5, 0.5, 10.0], steps=2, slots=2, step_seconds=1.0)
    # The second joins at 1; the third finds a slot when the first leaves, at 2.
    assert found.tolist() == [2.0, 2.5, 3.5, 2.0]


def loadtest(out: Path, target: str, metrics: str, *arguments: str) -> Stage:
    where = ("--target", target, "--metrics", metrics, "--out", str(out), "--lengths", f"fixed:{LENGTH}", "--quiet")
    found = run_beamline("loadtest", *where, *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    report = read(out)
    assert report.complete
    return report.stages[0]


def intended_times(out: Path) -> list[float]:
    with (out / "requests.csv").open() as file:
        return [float(row["intended"]) for row in csv.DictReader(file)]


def test_no_answer_is_faster_than_the_server_can_be(tmp_path: Path):
    """The short sample: bounds that hold however busy the machine is."""
    with serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", "20", "--fake-slots", "2") as server:
        arguments = ("--rate", "15", "--duration", "3s", "--warmup", "0.5s", "--seed", "4")
        stage = loadtest(tmp_path / "open", server.grpc, server.metrics_address, *arguments)
        assert latency_of(stage).minimum >= STEPS * 0.020
        assert stage.server_times[0].mean_step_seconds is not None
        assert stage.server_times[0].mean_step_seconds >= 0.020
        assert stage.source_tokens_rate == pytest.approx(STEPS * stage.throughput)
        times = intended_times(tmp_path / "open")
        assert times == pytest.approx(Poisson(15).times(3.5, 4), abs=1e-6)
        # Nobody waits less than in the same queue with perfect steps, summed over all.
        perfect = latencies(times, STEPS, 2, 0.020)[np.asarray(times) >= 0.5]
        assert latency_of(stage).mean >= 0.98 * perfect.mean()

        brief = ("--duration", "1.5s", "--warmup", "0.2s")
        closed = loadtest(tmp_path / "closed", server.grpc, server.metrics_address, "--clients", "6", *brief)
        # Two slots; and at the beginning every client may have an answer that it had no time to read before.
        assert closed.throughput <= 1.02 * 2 / (STEPS * 0.020) + (6 + 2) / 1.5
        assert not closed.open_loop


def way_there(times: list[float], seed: int) -> list[float]:
    """The arrivals as they may come to a server some milliseconds away. Whether one just catches a step changes who
    waits for whom for a long time: at a load of 0.85 the median of a minute differs by up to 7 % for it."""
    arrivals: list[float] = (np.asarray(times) + np.random.default_rng(seed).uniform(0, 0.004, len(times))).tolist()
    return sorted(arrivals)


def within(found: float, simulated: Sequence[float]) -> bool:
    """5 % of what one of the simulated queues gives."""
    return 0.95 * min(simulated) <= found <= 1.05 * max(simulated)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("load", [0.5, 0.7, 0.85])
def test_percentiles_match_the_simulated_queue(tmp_path: Path, load: float):
    slots, step_ms, warmup = 4, 75.0, 5.0  # long, so that the way there and back (some milliseconds) is little of it
    rate = load * slots / (STEPS * step_ms / 1000)
    with serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", str(step_ms), "--fake-slots", str(slots)) as server:
        arguments = ("--rate", str(rate), "--duration", "60s", "--warmup", f"{warmup}s", "--seed", "11")
        stage = loadtest(tmp_path / "out", server.grpc, server.metrics_address, *arguments)
    # What a step really takes is the server's own business, and its own count of it is used.
    step = stage.server_times[0].mean_step_seconds
    assert step is not None
    assert 0.99 * step_ms / 1000 <= step <= 1.5 * step_ms / 1000  # a busy host wakes nobody on time
    times = intended_times(tmp_path / "out")
    after = np.asarray(times) >= warmup
    expected = [latencies(way_there(times, seed), STEPS, slots, step)[after] for seed in range(20)]
    assert within(latency_of(stage).mean, [float(each.mean()) for each in expected]), "mean"
    for share in (0.5, 0.9, 0.95, 0.99):
        wanted = [float(np.quantile(each, share, method="inverted_cdf")) for each in expected]
        assert within(percentile(stage, share), wanted), share
    assert stage.throughput == pytest.approx(after.sum() / 60, rel=0.05)
    assert not stage.client.saturated, stage.client.reasons


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_closed_loop_obeys_littles_law(tmp_path: Path):
    slots, clients, step_ms = 4, 10, 25.0
    with serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", str(step_ms), "--fake-slots", str(slots)) as server:
        stage = loadtest(
            tmp_path / "out", server.grpc, server.metrics_address, "--clients", str(clients), "--duration", "30s"
        )
    step = stage.server_times[0].mean_step_seconds
    assert step is not None
    assert stage.throughput == pytest.approx(slots / (STEPS * step), rel=0.05)
    assert latency_of(stage).mean == pytest.approx(clients / stage.throughput, rel=0.05)


def stalled(tmp_path: Path, seconds: float, *arguments: str) -> Stage:
    """A run in whose middle the whole server stands still."""
    out = tmp_path / "out"
    with serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", "2", "--fake-slots", "32") as server:
        command = beamline("loadtest", "--target", server.grpc, "--out", str(out), "--lengths", f"fixed:{LENGTH}")
        with subprocess.Popen(
            [*command, "--quiet", "--overwrite", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        ) as client:
            # The first one is asked before the run begins, to see that all is well.
            eventually(lambda: server.metrics()("beamline_requests_total", outcome="ok") >= 5, "the run goes on")
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)  # the stall itself, not a wait for something
            server.process.send_signal(signal.SIGCONT)
            assert client.wait(timeout=PATIENCE) == 0
    return read(out).stages[0]


def test_a_stall_is_seen(tmp_path: Path):
    stage = stalled(tmp_path, 0.5, "--rate", "50", "--arrivals", "constant", "--duration", "3s", "--warmup", "0s")
    assert latency_of(stage).maximum >= 0.5 - 0.04  # who should have been sent at its beginning
    # A sixth of all should have been sent in the stall; at least a tenth waited for half of it or longer.
    assert percentile(stage, 0.9) >= 0.15


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_stall_of_a_second_is_in_p99_of_an_open_loop(tmp_path: Path):
    load = ("--rate", "100", "--duration", "10s", "--warmup", "0s")
    open_loop = stalled(tmp_path, 1.0, *load)
    # A tenth of all should have been sent in that second, and the slowest tenth of those waited for 0.9 s at least,
    # give or take what chance sends in a tenth of a second.
    assert 0.8 <= percentile(open_loop, 0.99) <= 1.25
    assert percentile(open_loop, 0.5) < 0.1
    # One polite client asks only once in that second: this is what the open loop is for.
    closed = stalled(tmp_path, 1.0, "--clients", "1", "--duration", "10s", "--warmup", "0s")
    assert percentile(closed, 0.99) < 0.1
    assert latency_of(closed).maximum >= 0.95


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
def test_two_thousand_a_second_or_it_says_so(tmp_path: Path, workers: int):
    with subprocess.Popen(
        [sys.executable, "-m", "tests.loadtest.echo_process"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as echo:
        assert echo.stdout is not None
        try:
            target = echo.stdout.readline().strip()
            where = ("--target", target, "--out", str(tmp_path), "--quiet", "--workers", str(workers))
            load = ("--rate", "2000", "--arrivals", "constant", "--lengths", "fixed:20", "--duration", "15s")
            found = run_beamline("loadtest", *where, *load)
        finally:
            echo.terminate()
    stage = read(tmp_path).stages[0]
    saturated = stage.client.saturated
    assert found.returncode == 0 or saturated, found.stdout + found.stderr
    assert saturated == ("THE LOAD TESTER IS THE BOTTLENECK" in found.stdout)
    # On an idle machine p99 is below 5 ms; tails are the machine's, and get ten times that. The middle is ours.
    assert (percentile(stage, 0.5) < 0.005 and percentile(stage, 0.99) < 0.05) or saturated, found.stdout
    assert stage.throughput == pytest.approx(2000, rel=0.05) or saturated, found.stdout
