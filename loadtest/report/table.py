"""The result as text for the terminal: one stage in detail, or a table of several."""

from __future__ import annotations

from collections.abc import Iterator

from beamline.loadtest.quantities import format_duration, format_rate, format_share
from beamline.loadtest.report.document import Distribution, Percentile, Report, Stage
from beamline.loadtest.report.remarks import Kind, remarks

_HEADS = {Kind.STOPPED: "STOPPED EARLY", Kind.NOT_RUN: "NOT RUN", Kind.STATUS: "failed", Kind.NOTE: "note"}


def summary(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    setup = report.setup
    models = ", ".join(model or "the default model" for model in setup.models)
    yield f"{models} at {setup.target}: {setup.workload}"
    if len(report.stages) == 1:
        yield from _stage(report.stages[0])
    else:
        yield from _sweep(report)
    for remark in remarks(report):
        yield f"{_HEADS[remark.kind]}: {remark.sentence}"
    for reason in dict.fromkeys(_saturation(report)):
        yield f"THE LOAD TESTER IS THE BOTTLENECK: {reason}"
    for gate in report.gates:
        yield f"{'FAILED' if gate.failed else 'ok':>8}  {gate.expression}: measured {gate.measured}"


def _stage(stage: Stage) -> Iterator[str]:
    warmup = f", after {stage.warmup:g} s of warm-up" if stage.warmup else ""
    yield f"{stage.arrivals}, measured for {stage.seconds:.4g} s{warmup}"
    yield ""
    unfinished = f", {stage.unfinished} not finished" if stage.unfinished else ""
    yield f"  {'requests':<14} {stage.sent} sent, {stage.ok} answered, {stage.failed} failed{unfinished}"
    yield f"  {'really sent':<14} {format_rate(stage.sent_rate)}"
    yield f"  {'throughput':<14} {format_rate(stage.throughput)}{_rate_interval(stage)}"
    if stage.target_tokens_rate:
        tokens = f"{format_rate(stage.source_tokens_rate)} read, {format_rate(stage.target_tokens_rate)} written"
        yield f"  {'tokens':<14} {tokens}"
    for name, distribution in (
        ("latency", stage.latency),
        *((each.model, each.latency) for each in stage.by_model),
        ("first token", stage.first_token),
        ("token gap", stage.token_gap),
        ("server's queue", stage.server_queue),
    ):
        yield from _distribution(name, distribution)
    for times in stage.server_times:
        if times.mean_step_seconds is not None:
            occupancy = f", {format_share(times.mean_occupancy)} of the slots" if times.mean_occupancy else ""
            steps = f"{times.steps} of {format_duration(times.mean_step_seconds)}{occupancy}"
            yield f"  {'steps':<14} {steps} ({times.model})"
    yield ""


def _distribution(name: str, distribution: Distribution | None) -> Iterator[str]:
    if distribution is None:
        return
    yield f"  {name:<14} mean {format_duration(distribution.mean)}, max {format_duration(distribution.maximum)}"
    for percentile in distribution.percentiles:
        yield f"  {f'p{100 * percentile.share:g}':>14} {value(percentile)}{_interval(percentile)}"


def _sweep(report: Report) -> Iterator[str]:
    yield ""
    yield f"  {'offered':>10} {'sent':>10} {'answered':>10} {'p50':>10} {'p95':>10} {'p99':>10} {'failed':>8}"
    for index, stage in enumerate(report.stages):
        by_share = {each.share: each for each in (stage.latency.percentiles if stage.latency else ())}
        values = " ".join(f"{value(by_share.get(share)):>10}" for share in (0.5, 0.95, 0.99))
        failed = format_share(stage.failed / stage.sent) if stage.sent else "-"
        mark = "  <- highest" if report.search is not None and report.search.stage == index else ""
        rates = (stage.offered_rate, stage.sent_rate, stage.throughput)
        saturated = "  (load tester saturated)" if stage.client.saturated else ""
        yield f"  {' '.join(f'{format_rate(rate):>10}' for rate in rates)} {values} {failed:>8}{mark}{saturated}"
    yield ""
    if report.search is not None:
        yield report.search.conclusion


def _saturation(report: Report) -> Iterator[str]:
    """Of a sweep's overloaded stages it is said in the table."""
    if len(report.stages) == 1:
        yield from report.stages[0].client.reasons
    elif report.search is not None and report.search.stage is not None:
        yield from report.stages[report.search.stage].client.reasons


def value(percentile: Percentile | None) -> str:
    if percentile is None:
        return "-"
    return f"{'>= ' if percentile.at_least else ''}{format_duration(percentile.seconds)}"


def _interval(percentile: Percentile) -> str:
    if percentile.interval is None:
        return ""
    return f"  ({format_duration(percentile.interval.low)} to {format_duration(percentile.interval.high)})"


def _rate_interval(stage: Stage) -> str:
    if stage.throughput_interval is None:
        return ""
    return f"  ({format_rate(stage.throughput_interval.low)} to {format_rate(stage.throughput_interval.high)})"
