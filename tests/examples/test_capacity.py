"""The simulation of a fleet, where theory or common sense knows the answer; beside real servers it is in
tests/end_to_end/test_capacity.py."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.arrivals import Poisson
from beamline.loadtest.report.document import ServerSample, ServerTimes, Stage, read
from examples.capacity.__main__ import main, print_machine
from examples.capacity.balancing import policy
from examples.capacity.measured import Measured, measured
from examples.capacity.simulation import Machine, simulate
from examples.capacity.sizing import fleet, smallest
from tests.loadtest.doubles import records_of, report_of, stage_from

MACHINE = Machine(slots=4, step_seconds=0.05)


def shares(name: str, machines: list[Machine], rate: float) -> list[float]:
    arrivals = Poisson(rate).times(60, 1)
    steps = np.random.default_rng(1).integers(2, 11, len(arrivals))
    found = simulate(arrivals, steps, machines, policy(name, [each.slots for each in machines]))
    late = arrivals > 20
    return [float(np.mean(found.servers[late] == number)) for number in range(len(machines))]


def test_requests_share_steps_and_wait_for_slots() -> None:
    """Three come at once to two slots; a step takes longer with two. The third begins when the second has left."""
    machine = Machine(slots=2, step_seconds=1.0, request_seconds=0.5, way_seconds=0.25)
    found = simulate([0.0, 0.0, 0.0], [3, 1, 1], [machine], policy("round-robin", [2]))
    # The first step has the first request only: the others arrive behind its beginning.
    assert found.latencies.tolist() == [1.5 + 2.0 + 2.0 + 0.25, 1.5 + 2.0 + 0.25, 1.5 + 2.0 + 2.0 + 0.25]


def test_engines_of_a_machine_share_its_requests() -> None:
    machine = Machine(slots=2, step_seconds=1.0, request_seconds=0.5, engines=2)
    found = simulate([0.0, 0.0, 0.0], [1, 1, 1], [machine], policy("round-robin", [2]))
    assert found.latencies.tolist() == [1.5, 1.5, 3.0]
    assert machine.capacity(1) == 2 / 1.5


def test_policies_send_less_to_a_slow_server() -> None:
    machines = [MACHINE, MACHINE, Machine(slots=4, step_seconds=0.1)]
    assert shares("round-robin", machines, 23) == pytest.approx([1 / 3] * 3, abs=0.01)
    for name in ("least-request", "weighted"):
        found = shares(name, machines, 23)
        assert found[2] < 0.27, name
        assert abs(found[0] - found[1]) < 0.05, name


def test_the_smallest_fleet_that_holds_the_limit() -> None:
    one = Measured(MACHINE, np.arange(2, 11))
    busy = [fleet(one, machines, 100, "least-request", 10) for machines in (10, 14)]
    assert busy[0].busy == pytest.approx(100 / (10 * MACHINE.capacity(6)))
    assert busy[1].percentile(0.99) <= busy[0].percentile(0.99)
    needed = {name: smallest(one, 100, 0.7, name, 10) for name in ("round-robin", "least-request")}
    for name, found in needed.items():
        assert found.percentile(0.99) <= 0.7
        assert fleet(one, found.machines - 1, 100, name, 10).percentile(0.99) > 0.7


def test_what_no_number_of_machines_can_do_is_said() -> None:
    with pytest.raises(LoadTestError, match=r"no number of machines .* a request has 0.5 s"):
        smallest(Measured(MACHINE, np.array([10])), 100, 0.4, "round-robin", 1)


def test_a_curve_that_contradicts_itself_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for behind, said in ((5.0, True), (1000.0, False), (None, False)):
        print_machine(Measured(MACHINE, np.array([5]), behind))
        assert ("did not keep up with 5.0 requests/s" in capsys.readouterr().out) is said


def curve(folder: Path, machine: Machine, rates: tuple[float, ...], steps: int = 5) -> Path:
    """As the load tester would find it of such a machine, with requests of `steps` tokens."""
    stages = []
    with (folder / "requests.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", "status", "latency", "target_tokens", "server_queue"])
        for number, rate in enumerate(rates, start=1):
            batch = rate * steps * machine.step_seconds / (1 - rate * steps * machine.request_seconds)
            seconds = machine.step(1) + (batch - 1) * machine.request_seconds
            latency = steps * seconds + machine.way_seconds
            times = Poisson(rate).times(30, number)
            stages.append(_stage(times, latency, rate, batch, seconds, machine.slots, steps))
            writer.writerows([number, "OK", latency, steps, 0.0] for _ in times)
    (folder / "report.json").write_text(report_of(*stages).model_dump_json())
    return folder


def _stage(times: object, latency: float, rate: float, batch: float, seconds: float, slots: int, steps: int) -> Stage:
    arrivals = np.asarray(times)
    stage = stage_from(records_of(arrivals, np.full(len(arrivals), latency)), rate, 30.0)
    count = int(stage.throughput * 30 * steps / batch)
    sample = ServerSample(at=1.0, model="m", queue_length=0, active_slots=0, slots=slots, occupancy=None)
    times_ = ServerTimes(model="m", steps=count, mean_step_seconds=seconds, mean_occupancy=batch / slots)
    return stage.model_copy(update={"server": (sample,), "server_times": (times_,)})


def test_a_machine_is_found_from_its_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(slots=8, step_seconds=0.010, request_seconds=0.002, way_seconds=0.003)
    found = measured(curve(tmp_path, machine, (5, 20, 40)))
    assert (found.machine.slots, set(found.steps)) == (8, {5})
    assert found.machine.step_seconds == pytest.approx(0.010, rel=0.01)
    assert found.machine.request_seconds == pytest.approx(0.002, rel=0.02)
    assert found.machine.way_seconds == pytest.approx(0.003, rel=0.05)
    given = [str(tmp_path), "--rate", "500", "--p99", "200ms", "--seconds", "4", "--price", "0.5", "--spare", "2"]
    assert main([*given, "--policy", "least-request"]) == 0
    printed = capsys.readouterr().out
    assert "8 slots" in printed
    machines = int(printed.partition("least-request: ")[2].split()[0])
    cost = (machines + 2) * 0.5
    assert f"{cost:.2f} an hour, {cost / (3600 * 500) * 1e6:.2f} for a million requests" in printed
    assert main([*given, "--p99", "1ms"]) == 2
    assert "no number of machines" in capsys.readouterr().err


def test_a_curve_of_one_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="--sweep"):
        measured(curve(tmp_path, MACHINE, (2,)))


def test_a_server_with_more_engines_than_it_is_said_to_have_is_refused(tmp_path: Path) -> None:
    curve(tmp_path, Machine(slots=8, step_seconds=0.010, request_seconds=0.002), (5, 20, 40))
    report = tmp_path / "report.json"
    content = report_of(*(_twice(stage) for stage in read(tmp_path).stages))
    report.write_text(content.model_dump_json())
    with pytest.raises(LoadTestError, match="more than 1 engine; say how many"):
        measured(tmp_path)
    assert measured(tmp_path, 2).machine.engines == 2


def _twice(stage: Stage) -> Stage:
    [times] = stage.server_times
    steps = int(1.5 * stage.seconds / (times.mean_step_seconds or 1))
    return stage.model_copy(update={"server_times": (times.model_copy(update={"steps": steps}),)})
