"""Conditions on a result: gates (`--fail-if "p95>500ms"`, for CI) and the SLO of the search (`--slo p95=500ms`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.judgement.statistics import fewest_requests
from beamline.loadtest.quantities import (
    format_duration,
    format_rate,
    format_share,
    parse_duration,
    parse_rate,
    parse_share,
)
from beamline.loadtest.report.document import Distribution, GateResult, Stage

_FEWEST_JUDGED, _SLOWER_JUDGED = 20, 5
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_EXPRESSION = re.compile(r"\s*([a-z_]+_)?(p[0-9.]+|mean|max|throughput|errors|rate)\s*(>=|<=|>|<)\s*(.+?)\s*")
_LIMIT = re.compile(r"\s*(first_token_|token_gap_)?p([0-9.]+)\s*(?:=|<=|<)\s*(.+?)\s*")
_PREFIXES = ("", "first_token_", "token_gap_")
_METRICS = (
    "pNN, mean or max (also with first_token_ or token_gap_ before it) as p95>500ms, errors as errors>1%, "
    "throughput or rate as throughput<20/s"
)
_VALUES: dict[str, Callable[[str], float]] = {
    "errors": parse_share,
    "throughput": parse_rate,
    "rate": parse_rate,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """Fails if `metric` compares so with `value`."""

    expression: str
    prefix: str  # which distribution
    metric: str
    comparison: str
    value: float

    def check(self, stage: Stage, found_rate: float | None) -> GateResult:
        measured = self._measured(stage, found_rate)
        if measured is None:  # what was not measured fails
            return GateResult(expression=self.expression, measured=self._why_nothing(stage), failed=True)
        failed = _COMPARE[self.comparison](measured, self.value)
        return GateResult(expression=self.expression, measured=self._shown(measured), failed=failed)

    def _measured(self, stage: Stage, found_rate: float | None) -> float | None:
        if self.metric == "throughput":
            return stage.throughput
        if self.metric == "errors":
            return stage.failed / stage.sent if stage.sent else None
        if self.metric == "rate":
            return found_rate
        return duration_of(_distribution(stage, self.prefix), self.metric)

    def _why_nothing(self, stage: Stage) -> str:
        if self.metric == "rate":
            return "nothing: only --slo searches for a rate"
        distribution = _distribution(stage, self.prefix) if self.metric != "errors" else None
        if distribution is None:
            return "nothing"
        needed = fewest_requests(float(self.metric[1:]) / 100)
        return f"nothing: {self.metric} takes at least {needed} requests, and there are {distribution.count}"

    def _shown(self, value: float) -> str:
        if self.metric == "errors":
            return format_share(value)
        return format_rate(value) if self.metric in ("throughput", "rate") else format_duration(value)


@dataclass(frozen=True, slots=True)
class Slo:
    """`p95=500ms`: what a rate has to hold."""

    expression: str
    prefix: str
    share: float
    seconds: float

    @property
    def metric(self) -> str:
        return f"{self.prefix}{_name(self.share)}"

    @property
    def least_requests(self) -> int:
        """Of a stage that is judged by this: some slower than the percentile, not only the one that makes it."""
        return max(_FEWEST_JUDGED, _SLOWER_JUDGED * fewest_requests(self.share))

    def measured(self, stage: Stage) -> float | None:
        return duration_of(_distribution(stage, self.prefix), _name(self.share))


def parse_gate(text: str) -> Gate:
    match = _EXPRESSION.fullmatch(text)
    if match is None or (match[1] or "") not in _PREFIXES:
        raise LoadTestError(f"--fail-if can't be {text!r}; write METRIC>VALUE or METRIC<VALUE, with {_METRICS}")
    prefix, metric, comparison, value = match[1] or "", match[2], match[3], match[4]
    if metric in _VALUES and prefix:
        raise LoadTestError(f"--fail-if {text!r}: {metric} takes no {prefix.rstrip('_')}")
    if metric[0] == "p":
        metric = _name(_share(text, metric[1:]))
    return Gate(
        text, prefix, metric, comparison, _value(f"--fail-if {text!r}", _VALUES.get(metric, parse_duration), value)
    )


def parse_slo(text: str) -> Slo:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise LoadTestError(f"--slo can't be {text!r}; write p95=500ms")
    return Slo(text, match[1] or "", _share(text, match[2]), _value(f"--slo {text!r}", parse_duration, match[3]))


def shares_of(gates: list[Gate], slo: Slo | None) -> set[float]:
    """The percentiles that have to be measured for these."""
    shares = {float(gate.metric[1:]) / 100 for gate in gates if gate.metric[0] == "p"}
    return shares | ({slo.share} if slo is not None else set())


def duration_of(distribution: Distribution | None, metric: str) -> float | None:
    """None for what was not measured: a percentile of too few requests is only the maximum by another name."""
    if distribution is None:
        return None
    if metric == "mean":
        return distribution.mean
    if metric == "max":
        return distribution.maximum
    return next((each.seconds for each in distribution.percentiles if _name(each.share) == metric), None)


def _distribution(stage: Stage, prefix: str) -> Distribution | None:
    return {"": stage.latency, "first_token_": stage.first_token, "token_gap_": stage.token_gap}[prefix]


def _name(share: float) -> str:
    return f"p{100 * share:.6g}"


def _share(text: str, percent: str) -> float:
    try:
        share = float(percent) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise LoadTestError(f"{text!r}: p{percent} is no percentile")
    return share


def _value(where: str, parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except LoadTestError as error:
        raise LoadTestError(f"{where}: {error}") from None
