"""From the records of one stage to its statistics: rates, percentiles with their intervals, and the timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.judgement import bootstrap
from beamline.loadtest.judgement.bootstrap import Block, Resampled
from beamline.loadtest.load import histogram
from beamline.loadtest.load.records import Records
from beamline.loadtest.report.document import (
    BlockCounts,
    CurvePoint,
    Distribution,
    Interval,
    ModelLatency,
    Percentile,
    StatusCount,
    TimeBin,
)
from beamline.loadtest.targets.status import DEADLINE_EXCEEDED, OK, STATUS_NAMES, UNFINISHED

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_BLOCKS = 30
_SHORTEST_BLOCK = 0.25  # seconds
_BINS = 240  # of the timeline, at most
_NEEDED_BEYOND = 1  # requests slower than a percentile, without which it is only the maximum by another name

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a stage, in seconds from its start."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 0.0)

    def cut(self, count: int) -> list[Window]:
        edges = np.linspace(self.begin, self.end, count + 1).tolist()
        return [Window(begin, end) for begin, end in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the records of the requests say about a stage; fields as in `report.document.Stage`."""

    sent: int
    ok: int
    failed: int
    unfinished: int
    sent_rate: float
    throughput: float
    throughput_interval: Interval | None
    source_tokens_rate: float
    target_tokens_rate: float
    latency: Distribution | None
    by_model: tuple[ModelLatency, ...]
    first_token: Distribution | None
    token_gap: Distribution | None
    server_queue: Distribution | None
    statuses: tuple[StatusCount, ...]
    blocks: tuple[BlockCounts, ...]
    curve: tuple[CurvePoint, ...]
    histogram: BlockCounts | None


def statistics_of(records: Records, window: Window, shares: Iterable[float] = SHARES) -> Statistics:
    measured = records.within(window.begin, window.end)
    rows = measured.rows
    good = rows["status"] == OK
    counted = good | (rows["status"] == DEADLINE_EXCEEDED)
    latency, timed_out = measured.latency[counted], ~good[counted]
    finished = finished_in(records, window)
    blocks = _blocks(records, window)
    resampled = Resampled([block_of(block) for block in blocks])
    wanted = sorted({*SHARES, *shares})
    return Statistics(
        sent=len(rows),
        ok=int(good.sum()),
        failed=int(_failed(rows["status"]).sum()),
        unfinished=int((rows["status"] == UNFINISHED).sum()),
        sent_rate=_sent_in(records, window) / window.seconds if window.seconds else 0.0,
        throughput=len(finished) / window.seconds if window.seconds else 0.0,
        throughput_interval=_interval(resampled, resampled.throughput()),
        source_tokens_rate=_per_second(finished["source_tokens"], window),
        target_tokens_rate=_per_second(finished["target_tokens"], window),
        latency=distribution(latency, wanted, resampled, timed_out),
        by_model=_by_model(records.models, rows["model"][counted], latency, timed_out, wanted),
        first_token=distribution(_known(rows["first_token"] - rows["intended"]), wanted),
        token_gap=distribution(measured.token_gaps["gap"], wanted),
        server_queue=distribution(_known(rows["server_queue"]), wanted),
        statuses=statuses_of(measured),
        blocks=blocks,
        curve=_curve(latency),
        histogram=_counts(window, measured, len(finished)) if len(latency) else None,
    )


def fewest_requests(share: float) -> int:
    """How many requests a percentile takes at least: with fewer, none is slower than it."""
    return math.ceil(_NEEDED_BEYOND / (1 - share) - 1e-6)


def _failed(status: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return np.asarray((status != OK) & (status != UNFINISHED))


def _sent_in(records: Records, window: Window) -> int:
    sent = records.rows["sent"]
    return int(((sent >= window.begin) & (sent < window.end)).sum())


def finished_in(records: Records, window: Window) -> NDArray[np.void]:
    """Good answers that came in this time, whenever they were asked for: what throughput counts."""
    rows = records.rows
    inside = (rows["finished"] >= window.begin) & (rows["finished"] < window.end)
    return np.asarray(rows[(rows["status"] == OK) & inside])


def distribution(
    values: Floats,
    shares: Sequence[float],
    resampled: Resampled | None = None,
    timed_out: NDArray[np.bool_] | None = None,
) -> Distribution | None:
    """`timed_out` marks those of which only a lower bound is known. They count: leaving them out would make a server
    that drops its slowest requests look fast."""
    if not len(values):
        return None
    order = np.argsort(values, kind="stable")
    percentiles = []
    for share in shares:
        rank = max(int(np.ceil(share * len(values))) - 1, 0)
        if len(values) < fewest_requests(share):
            continue
        place = order[rank]
        percentiles.append(
            Percentile(
                share=share,
                seconds=float(values[place]),
                interval=_interval(resampled, resampled.percentile(share)) if resampled is not None else None,
                at_least=bool(timed_out[place]) if timed_out is not None else False,
            )
        )
    return Distribution(
        count=len(values),
        mean=float(values.mean()),
        minimum=float(values.min()),
        maximum=float(values.max()),
        percentiles=tuple(percentiles),
    )


def timeline(records: Records, end: float) -> tuple[TimeBin, ...]:
    """Half-second bins, or longer ones in a long stage."""
    if not end:
        return ()
    bins = Window(0.0, end).cut(int(min(_BINS, max(np.ceil(end / 0.5), 1))))
    rows = records.rows
    edges = np.array([each.end for each in bins])
    # Sorting once instead of comparing every row with every bin.
    in_flight = np.searchsorted(np.sort(rows["sent"]), edges) - np.searchsorted(np.sort(rows["finished"]), edges)
    by_intended = np.searchsorted(rows["intended"], [0.0, *edges])
    answers = np.sort(rows["finished"][rows["status"] == OK])
    by_answer = np.searchsorted(answers, [0.0, *edges])
    found = []
    for index, each in enumerate(bins):
        part = rows[by_intended[index] : by_intended[index + 1]]
        good = (part["status"] == OK) | (part["status"] == DEADLINE_EXCEEDED)
        latency = (part["finished"] - part["intended"])[good]
        p50, p95, p99 = (
            np.quantile(latency, [0.5, 0.95, 0.99], method="inverted_cdf").tolist() if len(latency) else [None] * 3
        )
        found.append(
            TimeBin(
                start=each.begin,
                seconds=each.seconds,
                sent=len(part),
                answered=int(by_answer[index + 1] - by_answer[index]),
                failed=int(_failed(part["status"]).sum()),
                in_flight=float(in_flight[index]),
                p50=p50,
                p95=p95,
                p99=p99,
                maximum=float(latency.max()) if len(latency) else None,
            )
        )
    return tuple(found)


def block_of(counts: BlockCounts) -> Block:
    latencies = dict(zip(counts.buckets, counts.counts, strict=True))
    return Block(counts.seconds, counts.sent, counts.failed, counts.finished, latencies)


def _blocks(records: Records, window: Window) -> tuple[BlockCounts, ...]:
    count = min(_BLOCKS, int(window.seconds / _SHORTEST_BLOCK))
    return tuple(
        _counts(each, records.within(each.begin, each.end), len(finished_in(records, each)))
        for each in (window.cut(count) if count else [])
    )


def _counts(window: Window, measured: Records, finished: int) -> BlockCounts:
    status = measured.rows["status"]
    latency = measured.latency[(status == OK) | (status == DEADLINE_EXCEEDED)]
    buckets, counts = np.unique(histogram.buckets(latency), return_counts=True)
    return BlockCounts(
        seconds=window.seconds,
        sent=len(status),
        failed=int(_failed(status).sum()),
        finished=finished,
        buckets=tuple(buckets.tolist()),
        counts=tuple(counts.tolist()),
    )


def _by_model(
    models: tuple[str, ...],
    model_of: NDArray[np.uint16],
    latency: Floats,
    timed_out: NDArray[np.bool_],
    shares: Sequence[float],
) -> tuple[ModelLatency, ...]:
    found = []
    for index, model in enumerate(models if len(models) > 1 else ()):
        own = model_of == index
        latencies = distribution(latency[own], shares, timed_out=timed_out[own])
        if latencies is not None:
            found.append(ModelLatency(model=model, latency=latencies))
    return tuple(found)


def statuses_of(records: Records) -> tuple[StatusCount, ...]:
    found, counts = np.unique(records.rows["status"], return_counts=True)
    return tuple(
        StatusCount(status=STATUS_NAMES[status], count=count, detail=records.details.get(status, ""))
        for status, count in zip(found.tolist(), counts.tolist(), strict=True)
    )


def _curve(latency: Floats) -> tuple[CurvePoint, ...]:
    """As an HDR plot has them: ever finer towards the slowest."""
    if not len(latency):
        return ()
    nines = np.arange(0, np.log10(len(latency)) + 1e-9, 0.05)
    shares = [*(1 - 10**-nines).tolist(), 1.0]
    values = np.quantile(latency, shares, method="inverted_cdf").tolist()
    return tuple(CurvePoint(share=share, seconds=value) for share, value in zip(shares, values, strict=True))


def _interval(resampled: Resampled, samples: Floats) -> Interval | None:
    found = bootstrap.interval(samples) if resampled.enough else None
    return Interval(low=found[0], high=found[1]) if found is not None else None


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _per_second(values: NDArray[np.uint32], window: Window) -> float:
    return float(values.sum()) / window.seconds if window.seconds else 0.0
