"""The simulation of examples/capacity beside the real thing: three servers behind a real Envoy."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.capacity.balancing import policy
from examples.capacity.simulation import Floats, Machine, simulate
from tests.end_to_end.test_balancing import ROUND_ROBIN, answered, fleet, weighted
from tests.support.processes import ServerProcess, run_beamline

SLOTS = 4
WARM_UP, SECONDS = 20.0, 120.0  # weights are learned in the warm-up
SEEDS = 10  # chance has a part in it: the simulation's answer is the mean of so many
SHARES = (0.5, 0.9, 0.95, 0.99)


def mean_step(server: ServerProcess) -> float:
    found = server.metrics()
    return found("beamline_step_seconds_sum") / found("beamline_step_seconds_count")


def requests(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open() as file:
        return list(csv.DictReader(file))


def percentiles(latencies: Floats) -> Floats:
    return np.quantile(latencies, SHARES, method="inverted_cdf")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "envoys", "steps_ms", "rate"),
    [
        ("round-robin", ROUND_ROBIN, (50, 50, 50), 28.0),
        ("least-request", None, (50, 50, 50), 28.0),
        ("least-request", None, (50, 50, 100), 23.0),
        ("weighted", weighted(), (50, 50, 100), 23.0),
    ],
)
def test_the_simulation_agrees_with_servers_behind_envoy(
    tmp_path: Path,
    name: str,
    envoys: dict[str, Any] | None,
    steps_ms: tuple[int, ...],
    rate: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Requests of 2 to 10 steps, sent by chance: at three quarters of what the servers could do, or a little less."""
    options = [("--fake-step-ms", str(each), "--fake-slots", str(SLOTS)) for each in steps_ms]
    out = tmp_path / "out"
    with fleet(tmp_path, *options, policy=envoys, retries=False) as (servers, balancer):
        sent = ("--target", f"127.0.0.1:{balancer.port}", "--rate", str(rate), "--lengths", "uniform:1:9")
        when = ("--warmup", f"{WARM_UP}s", "--duration", f"{SECONDS}s", "--seed", "3")
        # What a call takes outside the engines, measured before there is any load.
        alone = (*sent[:2], "--clients", "1", "--lengths", "fixed:1", "--duration", "8s", "--warmup", "1s")
        assert run_beamline("loadtest", *alone, "--out", str(tmp_path / "alone"), "--quiet").returncode == 0
        before = answered(servers)
        done = run_beamline("loadtest", *sent, *when, "--out", str(out), "--quiet")
        assert done.returncode == 0, done.stdout + done.stderr
        shares = np.subtract(answered(servers), before)
        steps = [mean_step(server) for server in servers]
    quiet, rows = requests(tmp_path / "alone"), requests(out)
    of_fast = [float(row["latency"]) for row in quiet if float(row["latency"]) < 3 * min(steps)]
    way = max(0.0, float(np.median(of_fast)) - 2 * min(steps))
    times = np.array([float(row["intended"]) for row in rows])
    lengths = np.array([int(row["source_tokens"]) for row in rows])
    measured = times >= WARM_UP
    machines = [Machine(SLOTS, step, way_seconds=way) for step in steps]
    runs = [simulate(times, lengths, machines, policy(name, [SLOTS] * 3, seed)) for seed in range(SEEDS)]
    simulated = [run.latencies[measured] for run in runs]
    found = np.array([float(row["latency"]) for row in rows])[measured]
    expected = np.mean([percentiles(each) for each in simulated], axis=0)
    wanted = np.mean([np.bincount(run.servers, minlength=3) for run in runs], axis=0)
    with capsys.disabled():
        print(f"\n{name}, steps of {', '.join(f'{1000 * step:.1f}' for step in steps)} ms, {len(found)} requests")
        print(f"  mean {1000 * found.mean():.0f} ms, simulated {1000 * np.mean(simulated):.0f}")
        for share, real, made in zip(SHARES, percentiles(found), expected, strict=True):
            print(f"  p{100 * share:g} {1000 * real:.0f} ms, simulated {1000 * made:.0f} ({real / made:.2f})")
        print(f"  shares {shares / shares.sum()}, simulated {wanted / wanted.sum()}")
    assert found.mean() == pytest.approx(np.mean(simulated), rel=0.1)
    assert percentiles(found) == pytest.approx(expected, rel=0.1)
    assert shares / shares.sum() == pytest.approx(wanted / wanted.sum(), abs=0.05)
