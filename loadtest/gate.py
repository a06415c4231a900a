"""Conditions on a result: `--fail-if "p95>500ms"` for other people's CI, and `--slo p95=500ms` for the search."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from loadtest import units
from loadtest.errors import LoadTestError
from loadtest.report.document import Distribution, GateResult, Stage

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_EXPRESSION = re.compile(r"\s*([a-z_]+_)?(p[0-9.]+|mean|max|throughput|errors|rate)\s*(>=|<=|>|<)\s*(.+?)\s*")
_LIMIT = re.compile(r"\s*(first_token_|token_gap_)?p([0-9.]+)\s*(?:=|<=|<)\s*(.+?)\s*")
_PREFIXES = ("", "first_token_", "token_gap_")
_METRICS = "pNN, mean, max (also with first_token_ or token_gap_ before it), throughput, errors, rate"


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
        if measured is None:  # what can't be measured can't be promised
            return GateResult(expression=self.expression, measured="nothing", failed=True)
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

    def _shown(self, value: float) -> str:
        if self.metric == "errors":
            return units.share(value)
        return units.rate(value) if self.metric in ("throughput", "rate") else units.duration(value)


@dataclass(frozen=True, slots=True)
class Limit:
    """`p95=500ms`: what a rate has to hold."""

    expression: str
    prefix: str
    share: float
    seconds: float

    def holds(self, stage: Stage) -> bool:
        measured = duration_of(_distribution(stage, self.prefix), _name(self.share))
        return measured is not None and measured <= self.seconds


def parse_gate(text: str) -> Gate:
    match = _EXPRESSION.fullmatch(text)
    if match is None or (match[1] or "") not in _PREFIXES:
        raise LoadTestError(f"--fail-if can't be {text!r}; write METRIC>VALUE or METRIC<VALUE with one of {_METRICS}")
    prefix, metric, comparison, value = match[1] or "", match[2], match[3], match[4]
    if metric in ("throughput", "rate", "errors"):
        if prefix:
            raise LoadTestError(f"--fail-if {text!r}: {metric} takes no {prefix.rstrip('_')}")
        return Gate(text, prefix, metric, comparison, _number(text, value, percent=metric == "errors"))
    if metric[0] == "p":
        metric = _name(_share(text, metric[1:]))
    return Gate(text, prefix, metric, comparison, units.seconds(value))


def parse_limit(text: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise LoadTestError(f"--slo can't be {text!r}; write p95=500ms")
    return Limit(text, match[1] or "", _share(text, match[2]), units.seconds(match[3]))


def shares_of(gates: list[Gate], limit: Limit | None) -> set[float]:
    """The percentiles that have to be measured for these."""
    shares = {float(gate.metric[1:]) / 100 for gate in gates if gate.metric[0] == "p"}
    return shares | ({limit.share} if limit is not None else set())


def duration_of(distribution: Distribution | None, metric: str) -> float | None:
    if distribution is None:
        return None
    if metric == "mean":
        return distribution.mean
    if metric == "max":
        return distribution.maximum
    found = (each.seconds for each in distribution.percentiles if _name(each.share) == metric)
    return next(found, distribution.maximum)  # too few requests for the percentile: it is at most this


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


def _number(text: str, value: str, percent: bool) -> float:
    scale = 1.0
    if percent and value.endswith("%"):
        value, scale = value[:-1].strip(), 0.01
    try:
        return float(value.removesuffix("/s")) * scale
    except ValueError:
        raise LoadTestError(f"{text!r}: {value!r} is no number") from None
