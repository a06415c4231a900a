"""The messages between the parent and its worker processes: commands one way, results and progress the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from beamline.loadtest.load.arrivals import ClosedLoop, Times
from beamline.loadtest.load.records import Records
from beamline.loadtest.load.workload import Workload
from beamline.loadtest.targets.target import Connection

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
    """Send one request of each kind, and answer with the first one that fails."""


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


Command = Check | OpenStage | ClosedStage | Stop | Quit

# -- from a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    pass


@dataclass(frozen=True, slots=True)
class Checked:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker can't begin; the reason is a sentence for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts since the last progress message, but for `in_flight`, which is the number now."""

    worker: int
    sent: int
    in_flight: int
    statuses: Counter[int]
    latencies: Counter[int]  # buckets of answered requests


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """How busy and how late the worker was while it sent."""

    cpu_seconds: float
    wall_seconds: float
    loop_lags: np.ndarray  # seconds


@dataclass(frozen=True, slots=True)
class StageDone:
    records: Records
    health: WorkerHealth


Result = Connected | Checked | Refused | Progress | StageDone
