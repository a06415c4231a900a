"""The result as a page of documentation: what was measured, how, and the curve."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest import units
from loadtest.report.document import Report, Stage
from loadtest.report.table import found, value

_SHARES = (0.5, 0.95, 0.99)


def markdown(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    setup, machine = report.setup, report.machine
    models = ", ".join(f"`{model}`" if model else "the default model" for model in setup.models)
    yield f"# {report.title}"
    yield ""
    yield (
        f"{models}, {setup.workload}. Measured on {report.created[:10]} by `beamline loadtest` {machine.beamline} from "
        f"a machine with {machine.cpus} CPUs ({machine.system}). Latency counts from when a request should "
        "have been sent; the intervals are 95 % confidence."
    )
    yield ""
    yield "| offered | answered | p50 | p95 | p99 | failed | slots in use |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for stage in report.stages:
        yield _row(stage)
    if report.search is not None:
        yield ""
        yield f"**{found(report.search)}.**"
    if len(report.stages) > 1:
        yield ""
        yield from _curve(report)
    saturated = [units.rate(stage.throughput) for stage in report.stages if stage.client.saturated]
    if saturated:
        yield ""
        yield f"The load tester itself was the bottleneck at {', '.join(saturated)}."
    yield ""
    yield "The same again:"
    yield ""
    yield f"    {setup.command}"


def _row(stage: Stage) -> str:
    percentiles = {each.share: each for each in (stage.latency.percentiles if stage.latency is not None else ())}
    latencies = []
    for share in _SHARES:
        found = percentiles.get(share)
        interval = found.interval if found is not None else None
        spread = f" ({units.duration(interval.low)} to {units.duration(interval.high)})" if interval is not None else ""
        latencies.append(f"{value(found)}{spread}")
    used = [each.mean_occupancy for each in stage.server_times if each.mean_occupancy is not None]
    cells = [
        units.rate(stage.offered_rate) if stage.offered_rate is not None else stage.arrivals,
        units.rate(stage.throughput),
        *latencies,
        units.share(stage.failed / stage.sent) if stage.sent else "-",
        ", ".join(units.share(each) for each in used) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _curve(report: Report) -> Iterator[str]:
    """In Mermaid, which GitHub and GitLab draw by themselves."""
    stages = sorted(
        (stage for stage in report.stages if _drawable(stage)), key=lambda each: each.offered_rate or each.throughput
    )
    if len(stages) < 2:
        return
    yield "```mermaid"
    yield "xychart-beta"
    yield '    title "Latency (ms: p50, p95, p99) by answered requests per second"'
    rates = ", ".join(f'"{stage.throughput:.4g}"' for stage in stages)
    yield f"    x-axis [{rates}]"
    yield '    y-axis "ms"'
    for share in _SHARES:
        yield f"    line [{', '.join(f'{1000 * _seconds(stage, share):.4g}' for stage in stages)}]"
    yield "```"


def _drawable(stage: Stage) -> bool:
    shares = {each.share for each in stage.latency.percentiles} if stage.latency is not None else set()
    return shares >= set(_SHARES)


def _seconds(stage: Stage, share: float) -> float:
    assert stage.latency is not None
    return next(each.seconds for each in stage.latency.percentiles if each.share == share)
