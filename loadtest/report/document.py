"""The stored result of a run: `report.json`. Everything else (table, page, comparison) is made from it.

Durations are seconds, rates are per second, shares are between 0 and 1. A reader refuses a format version that it does
not know. Within a version, fields are only added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from beamline.loadtest.errors import LoadTestError

FORMAT = "beamline.loadtest"
FORMAT_VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Interval(_Record):
    """95 % confidence, by drawing blocks of time again (see judgement/bootstrap.py)."""

    low: float
    high: float


class Percentile(_Record):
    share: float  # 0.95 for p95
    seconds: float
    interval: Interval | None  # none for a run that is too short
    at_least: bool  # the request at this rank was given up at its deadline: its true latency is longer


class Distribution(_Record):
    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: tuple[Percentile, ...]


class ModelLatency(_Record):
    model: str
    latency: Distribution


class StatusCount(_Record):
    status: str
    count: int
    detail: str  # what the server said the first time


class TimeBin(_Record):
    """A stretch of the stage, warm-up included. Latencies are of the requests that should have been sent in it."""

    start: float
    seconds: float
    sent: int
    answered: int  # good answers that came in it
    failed: int
    in_flight: float  # at its end
    p50: float | None
    p95: float | None
    p99: float | None
    maximum: float | None


class BlockCounts(_Record):
    """One block for the bootstrap. The buckets are those of load/histogram.py."""

    seconds: float
    sent: int
    failed: int
    finished: int
    buckets: tuple[int, ...]
    counts: tuple[int, ...]


class CurvePoint(_Record):
    share: float
    seconds: float


class ServerSample(_Record):
    at: float
    model: str
    queue_length: float
    active_slots: float
    slots: float
    occupancy: float | None  # of the steps since the last sample; none if there was no step


class ServerTimes(_Record):
    """Of the server's own counting, over the measured time."""

    model: str
    steps: int
    mean_step_seconds: float | None
    mean_occupancy: float | None


class ClientHealth(_Record):
    """Whether the load tester itself was the bottleneck. With `reasons`, the latencies are partly its own."""

    saturated: bool
    reasons: tuple[str, ...]
    send_lag_p50: float | None
    send_lag_p99: float | None
    send_lag_max: float | None
    loop_lag_p99: float | None
    busiest_worker: float  # share of a core
    machine_busy: float | None  # share of all cores, used by any process
    crowded: bool = False  # no core was free, and a good part of them was ours: a server beside us had to wait


class Stage(_Record):
    arrivals: str
    open_loop: bool
    offered_rate: float | None
    warmup: float
    seconds: float  # measured, after the warm-up
    sent: int
    ok: int
    failed: int
    unfinished: int = 0  # no answer yet when the run was stopped: neither ok nor failed
    sent_rate: float | None = None  # what was really sent of what was offered
    throughput: float  # good answers per second of the measured time
    throughput_interval: Interval | None
    source_tokens_rate: float
    target_tokens_rate: float
    latency: Distribution | None  # from the intended send time; of answered and of timed-out requests
    by_model: tuple[ModelLatency, ...]  # the same for each, where there are several
    first_token: Distribution | None  # streamed answers only, as the next one
    token_gap: Distribution | None
    server_queue: Distribution | None  # as the server says in its answers
    statuses: tuple[StatusCount, ...]
    timeline: tuple[TimeBin, ...]
    blocks: tuple[BlockCounts, ...]
    curve: tuple[CurvePoint, ...]  # latency by share
    histogram: BlockCounts | None
    server: tuple[ServerSample, ...]
    server_times: tuple[ServerTimes, ...]
    client: ClientHealth
    notes: tuple[str, ...]
    stopped: str | None  # why it ended before its time
    after: tuple[StatusCount, ...] = ()  # what the requests after the measured time came to, where the server was lost


class GateResult(_Record):
    expression: str
    measured: str
    failed: bool


class SearchResult(_Record):
    limit: str
    rate: float | None  # the highest that held it; none if none did
    stage: int | None  # the one that shows it
    limited_by_client: bool
    exhausted: bool  # the largest allowed rate still held it
    conclusion: str = ""  # in a sentence


class Setup(_Record):
    target: str
    protocol: str
    models: tuple[str, ...]
    workload: str
    options: tuple[str, ...]
    seed: int
    workers: int
    channels: int
    deadline: float
    tls: bool
    token: bool
    command: str


class Machine(_Record):
    """Of the load tester."""

    system: str
    cpus: int
    python: str
    beamline: str


class Report(_Record):
    format: Literal["beamline.loadtest"] = "beamline.loadtest"
    format_version: Literal[1] = 1
    created: str  # ISO 8601
    title: str
    setup: Setup
    machine: Machine
    stages: tuple[Stage, ...]
    search: SearchResult | None
    gates: tuple[GateResult, ...]
    complete: bool
    not_run: tuple[str, ...] = ()  # stages that were wanted, but the run was stopped before


class _Head(BaseModel):
    format: str
    format_version: int


def read(path: Path) -> Report:
    """A report, or the folder that holds one."""
    file = path / "report.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise LoadTestError(f"{file} can't be read: {error.strerror}") from error
    try:
        head = _Head.model_validate_json(content)
    except ValidationError as error:
        raise LoadTestError(f"{file} is no report of a load test") from error
    if (head.format, head.format_version) != (FORMAT, FORMAT_VERSION):
        raise LoadTestError(
            f"{file} has the format {head.format} {head.format_version}; this beamline reads {FORMAT} {FORMAT_VERSION}"
        )
    try:
        return Report.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise LoadTestError(f"{file} is damaged: {place}: {first['msg']}") from error
