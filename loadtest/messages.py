"""What the parent and its worker processes say to each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from beamline.loadtest.arrivals import ClosedLoop, Times
from beamline.loadtest.client import Connection
from beamline.loadtest.record import Records
from beamline.loadtest.workload import Workload

# -- to a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    connection: Connection
    workload: Workload
    models: tuple[str, ...]
    worker: int  # of how many: worker w sends the requests w, w + workers, w + 2 * workers, ...
    workers: int


@dataclass(frozen=True, slots=True)
class Check:
    """Send one request of each kind, and say what is wrong with it."""


@dataclass(frozen=True, slots=True)
class OpenStage:
    start: float  # by time.monotonic, which all processes of a machine share
    times: Times  # this worker's part, from the start
    duration: float


@dataclass(frozen=True, slots=True)
class ClosedStage:
    start: float
    loop: ClosedLoop  # `clients` are this worker's own
    duration: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Send nothing more, and don't wait long for what is in flight."""


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Order = Check | OpenStage | ClosedStage | Stop | Quit

# -- from a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    pass


@dataclass(frozen=True, slots=True)
class Checked:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """It can't begin; the reason is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Since the last one, but for `in_flight`."""

    worker: int
    sent: int
    in_flight: int
    statuses: Counter[int]
    latencies: Counter[int]  # buckets of answered requests


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """How the worker itself fared while it sent."""

    cpu_seconds: float
    wall_seconds: float
    loop_lags: np.ndarray  # seconds


@dataclass(frozen=True, slots=True)
class StageDone:
    records: Records
    health: WorkerHealth


Report = Connected | Checked | Refused | Progress | StageDone
