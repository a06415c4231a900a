"""The progress of a run: one line that is overwritten in a terminal, or a line every few seconds in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter, deque
from typing import TextIO

from beamline.loadtest.load import histogram
from beamline.loadtest.load.worker_messages import Progress
from beamline.loadtest.quantities import format_duration, format_rate
from beamline.loadtest.targets.status import OK, STATUS_NAMES, UNFINISHED

_WINDOW = 5.0  # seconds that the numbers are of
_REDRAW = 0.2
_LOG_EVERY = 10.0


class ProgressLine:
    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._quiet = quiet
        self._title = ""
        self._duration = 0.0
        self._began = 0.0
        self._drawn = 0.0
        self._recent: deque[tuple[float, Progress]] = deque()
        self._errors: Counter[int] = Counter()
        self._in_flight: dict[int, int] = {}  # by worker

    def begin(self, title: str, duration: float) -> None:
        self._title, self._duration = title, duration
        self._began = self._drawn = time.monotonic()
        self._recent.clear()
        self._errors.clear()
        self._in_flight.clear()

    def see(self, progress: Progress) -> None:
        now = time.monotonic()
        self._recent.append((now, progress))
        self._in_flight[progress.worker] = progress.in_flight
        while self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()
        self._errors.update(
            {status: count for status, count in progress.statuses.items() if status not in (OK, UNFINISHED)}
        )
        if not self._quiet and now - self._drawn >= (_REDRAW if self._terminal else _LOG_EVERY):
            self._drawn = now
            self._write(self.line(now))

    def end(self) -> None:
        if self._terminal and not self._quiet:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def line(self, now: float) -> str:
        reports = [progress for _, progress in self._recent]
        span = max(min(now - self._began, _WINDOW), 0.25)
        latencies = histogram.added([report.latencies for report in reports])
        percentiles = "  ".join(
            f"p{share * 100:.0f} {format_duration(histogram.percentile(latencies, share)):>8}"
            for share in (0.5, 0.95, 0.99)
        )
        errors = ", ".join(f"{count} {STATUS_NAMES[status]}" for status, count in self._errors.most_common())
        return (
            f"{self._title}  {min(now - self._began, self._duration):4.0f}/{self._duration:.0f} s"
            f"  sent {format_rate(sum(report.sent for report in reports) / span):>7}"
            f"  ok {format_rate(sum(report.statuses[OK] for report in reports) / span):>7}"
            f"  in flight {sum(self._in_flight.values()):4d}  {percentiles}  errors {errors or 0}"
        )

    def _write(self, line: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\033[K{line[: width - 1]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
