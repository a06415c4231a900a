"""`python -m examples.capacity REPORT --rate 10000 --p99 500ms`: from one machine's curve to a fleet.

REPORT is what `beamline loadtest --sweep ... --metrics HOST:PORT --out REPORT` wrote: docs/capacity.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.quantities import format_duration, format_share, parse_duration, parse_rate
from examples.capacity.balancing import POLICIES
from examples.capacity.measured import Measured, measured
from examples.capacity.sizing import Fleet, smallest


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.capacity", description=__doc__)
    parser.add_argument("report", type=Path, help="a load tester's folder, of one machine")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="that the server had (%(default)s)")
    parser.add_argument("--rate", default="10000", help="requests per second, of all users (%(default)s)")
    parser.add_argument("--p99", default="500ms", help="what 99 of 100 requests must hold (%(default)s)")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="repeatable (default: all)")
    parser.add_argument("--price", type=float, metavar="X", help="of a machine for an hour, in your own currency")
    parser.add_argument("--spare", type=int, default=1, metavar="N", help="machines that may be missing (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="that are simulated (%(default)s)")
    options = parser.parse_args(given)
    try:
        rate, p99 = parse_rate(options.rate), parse_duration(options.p99)
        if not (rate > 0 and p99 > 0 and options.seconds > 0 and options.engines > 0 and options.spare >= 0):
            raise LoadTestError("--rate, --p99, --seconds and --engines must be above 0, and --spare 0 or more")
        one = measured(options.report, options.engines)
        print_machine(one)
        print(f"\n{rate:g} requests a second, 99 of 100 within {format_duration(p99)}:")
        for name in options.policy or POLICIES:
            print_fleet(name, smallest(one, rate, p99, name, options.seconds), rate, options.spare, options.price)
    except LoadTestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_machine(one: Measured) -> None:
    machine, steps = one.machine, float(one.steps.mean())
    print(
        f"One machine: {machine.slots} slots in {machine.engines} engine{'s' * (machine.engines > 1)}, "
        f"steps of {format_duration(machine.step_seconds)} and {format_duration(machine.request_seconds)} more "
        f"for each request, {steps:.1f} steps a request, "
        f"{format_duration(machine.way_seconds)} outside the engine: at most {machine.capacity(steps):.1f} requests/s"
    )
    if one.behind is not None and one.behind < machine.capacity(steps):
        print(
            f"Don't rely on it: measured, it did not keep up with {one.behind:.1f} requests/s. Something else took its "
            "time, the load tester on the same cores, say, or the stages were too short."
        )


def print_fleet(name: str, found: Fleet, rate: float, spare: int, price: float | None) -> None:
    machines = found.machines + spare
    line = (
        f"  {name}: {found.machines} machines, {format_share(found.busy)} of what they can do, "
        f"p50 {format_duration(found.percentile(0.5))}, p99 {format_duration(found.percentile(0.99))}; "
        f"with spare ones {machines}"
    )
    if price is not None:
        line += f", {machines * price:.2f} an hour, {machines * price / (3600 * rate) * 1e6:.2f} for a million requests"
    print(line)


if __name__ == "__main__":
    sys.exit(main())
