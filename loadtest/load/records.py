"""The record of every request: one row of a numpy array, which is also how it crosses between processes.

All times are in seconds from the start of the stage. `intended` is when the request should have been sent; latency
counts from there, so that a request that was sent late does not look fast.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.targets.status import OK, STATUS_NAMES

ROW = np.dtype(
    [
        ("number", np.int64),
        ("model", np.uint16),  # index into Records.models
        ("status", np.uint8),  # gRPC's number, or UNFINISHED
        ("intended", np.float64),
        ("sent", np.float64),
        ("finished", np.float64),
        ("first_token", np.float64),  # NaN for an answer that came in one piece
        ("source_tokens", np.uint32),
        ("target_tokens", np.uint32),
        ("server_queue", np.float64),  # seconds in the server's queue, as it says itself; NaN if it does not
    ]
)
GAP = np.dtype([("intended", np.float64), ("gap", np.float64)])  # between two tokens of a streamed answer
Rows = NDArray[np.void]

_CHUNK = 512  # packing takes 0.2 ms then: a pause that no percentile of a fast server shows


@dataclass(frozen=True, slots=True)
class Records:
    """The requests of one stage."""

    rows: Rows
    models: tuple[str, ...]
    token_gaps: Rows = field(default_factory=lambda: np.empty(0, GAP))
    details: dict[int, str] = field(default_factory=dict)  # per status, what the server said first

    @property
    def latency(self) -> NDArray[np.float64]:
        return np.asarray(self.rows["finished"] - self.rows["intended"], dtype=np.float64)

    def within(self, begin: float, end: float) -> Records:
        """Those that should have been sent between two moments."""

        def cut(rows: Rows) -> Rows:
            return rows[(rows["intended"] >= begin) & (rows["intended"] < end)]

        return Records(cut(self.rows), self.models, cut(self.token_gaps), self.details)


def merged(parts: Sequence[Records]) -> Records:
    """One stage's records from several processes, by intended time."""
    rows = np.concatenate([part.rows for part in parts]) if parts else np.empty(0, ROW)
    details: dict[int, str] = {}
    for part in parts:
        details = {**part.details, **details}
    gaps = np.concatenate([part.token_gaps for part in parts]) if parts else np.empty(0, GAP)
    models = parts[0].models if parts else ()
    return Records(rows[np.argsort(rows["intended"], kind="stable")], models, gaps, details)


class Recorder:
    """Takes rows one by one; packs them from time to time, since millions of Python tuples would be gigabytes."""

    def __init__(self, models: tuple[str, ...]) -> None:
        self.models = models
        self._index = {model: index for index, model in enumerate(models)}
        self._packed: list[Rows] = []
        self._loose: list[tuple[float, ...]] = []
        self._gaps: list[tuple[float, float]] = []
        self._details: dict[int, str] = {}

    def add(
        self,
        *,
        number: int,
        model: str,
        status: int,
        intended: float,
        sent: float,
        finished: float,
        token_times: Sequence[float] = (),
        source_tokens: int = 0,
        target_tokens: int = 0,
        server_queue: float = float("nan"),
        detail: str = "",
    ) -> None:
        first_token = float("nan")
        if token_times:
            first_token = token_times[0]
            self._gaps.extend((intended, later - time) for time, later in pairwise(token_times))
        if status != OK and status not in self._details:
            self._details[status] = detail
        self._loose.append(
            (
                number,
                self._index[model],
                status,
                intended,
                sent,
                finished,
                first_token,
                source_tokens,
                target_tokens,
                server_queue,
            )
        )
        if len(self._loose) >= _CHUNK:
            self._pack()

    def records(self) -> Records:
        self._pack()
        rows = np.concatenate(self._packed) if self._packed else np.empty(0, ROW)
        return Records(rows, self.models, np.array(self._gaps, dtype=GAP), dict(self._details))

    def _pack(self) -> None:
        if self._loose:
            self._packed.append(np.array(self._loose, dtype=ROW))
            self._loose = []


def write_csv(path: Path, stages: Iterable[tuple[int, Records]]) -> None:
    """Every request that was sent, the warm-up's too. Durations in seconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["number", "model", "status", "intended", "sent", "finished", "latency", "first_token"]
        writer.writerow(["stage", *head, "source_tokens", "target_tokens", "server_queue"])
        for stage, records in stages:
            for row in records.rows.tolist():
                number, model, status, intended, sent, finished, first_token, source, target, queue = row
                times = (intended, sent, finished, finished - intended)
                writer.writerow(
                    [stage, number, records.models[model], STATUS_NAMES[status]]
                    + [f"{value:.6f}" for value in times]
                    + [_known(first_token - intended), source, target, _known(queue)]
                )


def _known(value: float) -> str:
    return "" if value != value else f"{value:.6f}"
