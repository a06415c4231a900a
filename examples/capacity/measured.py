"""From the load tester's curve of one server to what the simulation needs of it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.report.document import ServerTimes, Stage, read
from examples.capacity.simulation import Machine

_APART = 1.2  # how far the largest mean batch must be from the smallest for a line through them
_AT_MOST = 1.1  # of its time an engine can step; metrics are read some time before and behind the stage
_KEPT_UP = 0.9  # of what was sent was answered: else slots were taken by requests that were answered later


@dataclass(frozen=True, slots=True)
class Measured:
    machine: Machine
    steps: NDArray[np.int64]  # of the requests that were sent
    behind: float | None = None  # the lowest rate, in requests a second, with which it did not keep up


@dataclass(frozen=True, slots=True)
class _Point:
    """A stage: how many took part in a step, and what it took, in the mean."""

    stage: int
    batch: float
    step_seconds: float
    count: int  # of steps
    slot_steps: float  # a request
    kept_up: bool  # with what was sent
    rate: float  # of what was answered, or sent where that is known


def measured(folder: Path, engines: int = 1) -> Measured:
    """Of the folder that `beamline loadtest --sweep ... --metrics HOST:PORT --out FOLDER` wrote; its model is the one
    that worked the most, in so many engines."""
    report = read(folder)
    slots = 0
    points = []
    for number, stage in enumerate(report.stages, start=1):
        times = max(stage.server_times, key=lambda each: each.steps, default=None)
        if times is None or times.mean_step_seconds is None or times.mean_occupancy is None or not stage.ok:
            continue
        slots = int(max(sample.slots for sample in stage.server if sample.model == times.model))
        stepping = times.steps * times.mean_step_seconds / stage.seconds
        if stepping > _AT_MOST * engines:
            raise LoadTestError(
                f"stage {number} of {folder} has {stepping:.1f} s of steps in a second: its server has more than "
                f"{engines} engine{'s' * (engines > 1)}; say how many ('beamline serve' prints it) by --engines"
            )
        points.append(_point(number, stage, times, slots, engines))
    if len(points) < 2 or max(each.batch for each in points) < _APART * min(each.batch for each in points):
        raise LoadTestError(
            f"{folder} does not show what a step costs with few and with many requests: measure with --metrics and "
            "--sweep, from a rate that leaves most slots free to one that fills most of them"
        )
    batches, seconds = np.array([each.batch for each in points]), np.array([each.step_seconds for each in points])
    slope, base = np.polyfit(batches, seconds, 1, w=np.sqrt([each.count for each in points]))
    if slope < 0 or base < 0:  # noise, where one of the two is nearly nothing
        slope, base = (0.0, float(seconds.mean())) if slope < 0 else (float((seconds / batches).mean()), 0.0)
    rows = _rows(folder)
    least = min(points, key=lambda each: each.batch)
    tokens = np.array([float(row["target_tokens"]) for row in rows])
    # A beam search goes on for some steps behind its best hypothesis, and a request takes a step for its end.
    of_stage = np.array([float(row["target_tokens"]) for row in rows if int(row["stage"]) == least.stage])
    steady = [each.slot_steps for each in points if each.kept_up] or [each.slot_steps for each in points]
    scale = float(np.mean(steady)) / float(tokens.mean())
    way = np.array(
        [float(row["latency"]) - float(row["server_queue"] or 0) for row in rows if int(row["stage"]) == least.stage]
    )
    way_seconds = max(0.0, float(np.median(way - scale * of_stage * least.step_seconds)))
    steps = np.maximum(1, np.rint(scale * tokens)).astype(np.int64)
    behind = min((each.rate for each in points if not each.kept_up), default=None)
    return Measured(Machine(slots, float(base), float(slope), way_seconds, engines), steps, behind)


def _point(number: int, stage: Stage, times: ServerTimes, slots: int, engines: int) -> _Point:
    assert times.mean_step_seconds is not None
    assert times.mean_occupancy is not None
    batch = times.mean_occupancy * slots / engines  # a server counts its engines together
    answered = stage.throughput * stage.seconds
    kept_up = stage.sent_rate is None or stage.throughput > _KEPT_UP * stage.sent_rate
    rate = stage.throughput if stage.sent_rate is None else stage.sent_rate
    return _Point(number, batch, times.mean_step_seconds, times.steps, batch * times.steps / answered, kept_up, rate)


def _rows(folder: Path) -> list[dict[str, str]]:
    file = (folder if folder.is_dir() else folder.parent) / "requests.csv"
    try:
        with file.open(encoding="utf-8") as content:
            return [row for row in csv.DictReader(content) if row["status"] == "OK"]
    except OSError as error:
        raise LoadTestError(f"{file} can't be read: {error.strerror}") from error
