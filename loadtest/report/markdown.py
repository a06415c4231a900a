"""The result as a page of documentation: what was measured, how, and the curve."""

from __future__ import annotations

from collections.abc import Iterator

from beamline.loadtest.quantities import format_duration, format_rate, format_share
from beamline.loadtest.report.document import Report, Stage
from beamline.loadtest.report.remarks import label, remarks
from beamline.loadtest.report.table import value

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
    yield "| offered | sent | answered | p50 | p95 | p99 | failed | slots in use |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for stage in report.stages:
        yield _row(stage)
    if report.search is not None:
        yield ""
        yield f"**{report.search.conclusion}.**"
    if len(report.stages) > 1:
        yield ""
        yield from _curve(report)
    notes = list(_notes(report))
    if notes:
        yield ""
        yield from notes
    yield ""
    yield "The same again:"
    yield ""
    yield f"    {setup.command}"


def _notes(report: Report) -> Iterator[str]:
    for remark in remarks(report):
        yield f"- {remark.kind.value}: {remark.sentence}"
    for stage in report.stages:
        if stage.client.saturated:
            yield f"- The load tester itself was the bottleneck at {label(stage)}: {'; '.join(stage.client.reasons)}"
    for gate in report.gates:
        yield f"- {'Failed' if gate.failed else 'Passed'}: `{gate.expression}`, measured {gate.measured}"


def _row(stage: Stage) -> str:
    percentiles = {each.share: each for each in (stage.latency.percentiles if stage.latency is not None else ())}
    latencies = []
    for share in _SHARES:
        found = percentiles.get(share)
        interval = found.interval if found is not None else None
        spread = (
            f" ({format_duration(interval.low)} to {format_duration(interval.high)})" if interval is not None else ""
        )
        latencies.append(f"{value(found)}{spread}")
    used = [each.mean_occupancy for each in stage.server_times if each.mean_occupancy is not None]
    cells = [
        label(stage),
        format_rate(stage.sent_rate),
        format_rate(stage.throughput),
        *latencies,
        format_share(stage.failed / stage.sent) if stage.sent else "-",
        ", ".join(format_share(each) for each in used) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _curve(report: Report) -> Iterator[str]:
    """In Mermaid, which GitHub and GitLab draw by themselves. It has no gaps: a percentile that a stage lacks gets no
    line, and every stage keeps its place."""
    answered = [stage for stage in report.stages if _milliseconds(stage)]
    stages = sorted(answered, key=lambda each: each.offered_rate or each.throughput)
    shares = [share for share in _SHARES if all(share in _milliseconds(stage) for stage in stages)]
    if len(stages) < 2 or not shares:
        return
    yield "```mermaid"
    yield "xychart-beta"
    names = ", ".join(f"p{100 * share:g}" for share in shares)
    yield f'    title "Latency (ms: {names}) by answered requests per second"'
    rates = ", ".join(f'"{stage.throughput:.4g}"' for stage in stages)
    yield f"    x-axis [{rates}]"
    yield '    y-axis "ms"'
    for share in shares:
        yield f"    line [{', '.join(f'{_milliseconds(stage)[share]:.4g}' for stage in stages)}]"
    yield "```"
    missing = ", ".join(f"p{100 * share:g}" for share in _SHARES if share not in shares)
    if missing:
        yield ""
        yield f"{missing} has no line here: not every stage had requests enough for it."


def _milliseconds(stage: Stage) -> dict[float, float]:
    """By share."""
    return {
        each.share: 1000 * each.seconds for each in (stage.latency.percentiles if stage.latency is not None else ())
    }
