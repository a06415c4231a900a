"""The remarks of a report (failures, early stops, caveats), each once for all stages that it is true of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from beamline.loadtest.quantities import format_rate
from beamline.loadtest.report.document import Report, Stage


class Kind(Enum):
    STOPPED = "Stopped early"
    NOT_RUN = "Not run"
    STATUS = "Failed"
    NOTE = "Note"


@dataclass(frozen=True, slots=True)
class Remark:
    kind: Kind
    stages: tuple[str, ...]  # that it is true of; empty where there is only one
    text: str

    @property
    def sentence(self) -> str:
        return f"{', '.join(self.stages)}: {self.text}" if self.stages else self.text


def remarks(report: Report) -> list[Remark]:
    found: dict[tuple[Kind, str], dict[str, None]] = {}
    for stage in report.stages:
        for kind, text in _of(stage):
            found.setdefault((kind, text), {})[label(stage)] = None
    if report.not_run:
        found[Kind.NOT_RUN, ", ".join(report.not_run)] = {}
    several = len(report.stages) > 1
    order = {kind: place for place, kind in enumerate(Kind)}
    return [
        Remark(kind, tuple(stages) if several else (), text)
        for (kind, text), stages in sorted(found.items(), key=lambda each: order[each[0][0]])
    ]


def label(stage: Stage) -> str:
    return format_rate(stage.offered_rate) if stage.offered_rate is not None else stage.arrivals


def _of(stage: Stage) -> Iterator[tuple[Kind, str]]:
    if stage.stopped:
        yield Kind.STOPPED, stage.stopped
    for status in stage.statuses:
        if status.status not in ("OK", "UNFINISHED"):
            yield Kind.STATUS, f"{status.count} {status.status}: {status.detail}"
    for status in stage.after:
        yield Kind.STATUS, f"{status.count} {status.status} after the measured time: {status.detail}"
    for note in stage.notes:
        yield Kind.NOTE, note
