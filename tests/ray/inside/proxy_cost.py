"""The inside of `python -m tests.benchmarks.ray_proxy`: two servers directly, behind Envoy, and behind Ray's proxy."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from beamline.loadtest.report.document import Distribution, read
from tests.benchmarks.table import print_table
from tests.ray.inside.cluster import GRPC, cluster, deploy
from tests.support.envoy import envoy
from tests.support.processes import run_beamline, serving

STEP_MS, SLOTS = 10, 64
DIRECT, ENVOY, RAY = WAYS = ("direct", "Envoy", "Ray")


@dataclass(frozen=True)
class Case:
    name: str
    clients: int
    characters: int  # one step each, and one for the end
    method: str = "translate"


CASES = (
    Case("20 ms, one at a time", 1, 1),
    Case("20 ms, 64 at once", 64, 1),
    Case("half a second, 16 at once", 16, 49),
    Case("half a second as a stream, 16 at once", 16, 49, "translate-stream"),
)


@dataclass(frozen=True)
class Measured:
    p50: float
    p95: float
    rate: float  # calls per second
    cpu: float  # seconds a call
    first: float | None  # of a stream


@dataclass(frozen=True)
class Way:
    name: str
    target: str
    processes: frozenset[int]  # that serve it; none: all that belong to no other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    options = parser.parse_args()
    found: dict[tuple[str, str], list[Measured]] = {}
    with ways() as three:
        for _ in range(options.rounds):
            for case in CASES:
                for way in three:  # in turns, so that all see the same weather
                    measured = measure(way, three, case, options.seconds)
                    found.setdefault((case.name, way.name), []).append(measured)
    print(f"Median of {options.rounds} rounds; latency and time to first piece in ms; ratios to direct in brackets.")
    header = ("load", "way", "p50", "p95", "first piece", "calls/s", "CPU ms a call")
    print_table([header, *(row(case, name, found) for case in CASES for name in WAYS)])


@contextmanager
def ways() -> Iterator[tuple[Way, ...]]:
    fake = {"fake": True, "fake_step_ms": STEP_MS, "fake_slots": SLOTS}
    options = [f"--fake-{name}={value}" for name, value in (("step-ms", STEP_MS), ("slots", SLOTS))]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = [folder / f"log{number}.txt" for number in range(2)]
        servers = [stack.enter_context(serving(log, "--fake", *options)) for log in logs]
        ports = [[int(address.rpartition(":")[2]) for address in pair] for pair in ((s.grpc, s.http) for s in servers)]
        grpc_ports, http_ports = zip(*ports, strict=True)
        balancer = stack.enter_context(envoy(folder, grpc_ports, http_ports))
        behind = frozenset(server.process.pid for server in servers)
        stack.enter_context(cluster())
        deploy(fake, num_replicas=2)
        yield (
            Way(DIRECT, "ipv4:" + ",".join(server.grpc for server in servers), behind),
            Way(ENVOY, f"127.0.0.1:{balancer.port}", behind | {balancer.process}),
            Way(RAY, GRPC, frozenset()),
        )


def measure(way: Way, others: tuple[Way, ...], case: Case, seconds: float) -> Measured:
    elsewhere = frozenset().union(*(other.processes for other in others))
    with tempfile.TemporaryDirectory() as out:
        load = ("--clients", str(case.clients), "--duration", f"{seconds}s", "--warmup", "1s", "--method", case.method)
        sent = ("--lengths", f"fixed:{case.characters}", "--workers", "1")
        before = cpu_seconds(way.processes, elsewhere)
        done = run_beamline("loadtest", "--target", way.target, "--out", out, "--overwrite", "--quiet", *load, *sent)
        spent = cpu_seconds(way.processes, elsewhere) - before
        assert done.returncode == 0, done.stdout + done.stderr
        stage = read(Path(out)).stages[0]
    assert stage.latency is not None
    calls = stage.throughput * (seconds + 1)  # with the warm-up's
    first = None if stage.first_token is None else percentile(stage.first_token, 0.5)
    return Measured(
        percentile(stage.latency, 0.5), percentile(stage.latency, 0.95), stage.throughput, spent / calls, first
    )


def percentile(of: Distribution, share: float) -> float:
    return next(each.seconds for each in of.percentiles if each.share == share)


def processes() -> frozenset[int]:
    """Of this network, which nobody else is in; without this one."""
    here = os.readlink("/proc/self/ns/net")
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns/net") == here:
                found.add(int(folder.name))
        except OSError:  # it has ended
            continue
    return frozenset(found - {os.getpid()})


def cpu_seconds(of: frozenset[int], elsewhere: frozenset[int]) -> float:
    ticks = 0
    for process in of or processes() - elsewhere:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])  # in user and in system mode
    return ticks / os.sysconf("SC_CLK_TCK")


def row(case: Case, way: str, found: dict[tuple[str, str], list[Measured]]) -> tuple[str, ...]:
    def cell(name: str, scale: float) -> str:
        ours, direct = (
            [getattr(each, name) for each in found[case.name, of] if getattr(each, name) is not None]
            for of in (way, DIRECT)
        )
        return f"{scale * median(ours):.1f} ({median(ours) / median(direct):.2f})" if ours else "-"

    names = (("p50", 1000), ("p95", 1000), ("first", 1000), ("rate", 1), ("cpu", 1000))
    return (case.name, way, *(cell(name, scale) for name, scale in names))


if __name__ == "__main__":
    main()
