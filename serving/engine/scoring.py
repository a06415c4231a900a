"""Scoring given texts by the teacher-forced graph, between two steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serving.backends.base import Backend
from serving.engine.request import next_id
from serving.errors import Cancelled, ComputeError, DeadlinePassed, Overloaded, RequestError

log = logging.getLogger(__name__)

MOST_TOKENS = 1024  # of one run, padding included
_MOST_ROWS = 32


@dataclass(eq=False, slots=True)
class ScoringRequest:
    """`labels` are what should follow each token of `target`. `resolve` is called once, on the engine's thread."""

    source: tuple[int, ...] | None
    target: tuple[int, ...]
    labels: tuple[int, ...]
    resolve: Callable[[tuple[float, ...] | Exception], None]
    deadline: float | None = None
    id: int = field(default_factory=next_id)


class Scoring:
    """`submit` and `cancel` may be called from any thread; the rest is the engine's."""

    def __init__(self, backend: Backend, clock: Callable[[], float], max_waiting: int) -> None:
        self._backend = backend
        self._clock = clock
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: deque[ScoringRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: ScoringRequest) -> None:
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} texts wait to be scored; try again later")
            self._waiting.append(request)

    def _snapshot(self) -> list[ScoringRequest]:
        with self._lock:
            return list(self._waiting)

    def cancel(self, request_id: int) -> None:
        self._drop([request for request in self._snapshot() if request.id == request_id], Cancelled("cancelled"))

    def fail(self, error: Exception) -> None:
        self._drop(self._snapshot(), error)

    def _drop(self, requests: Sequence[ScoringRequest], error: Exception) -> None:
        for request in requests:
            with self._lock:
                if request not in self._waiting:
                    continue
                self._waiting.remove(request)
            request.resolve(error)

    def advance(self, others_wait: bool) -> None:
        """Scores some: while others decode, one text; else as many of similar kind as make one run."""
        now = self._clock()
        late = [request for request in self._snapshot() if request.deadline is not None and now >= request.deadline]
        self._drop(late, DeadlinePassed("the deadline is over"))
        group = self._take(1 if others_wait else _MOST_ROWS)
        if group:
            self._run(group)

    def _take(self, rows: int) -> list[ScoringRequest]:
        group: list[ScoringRequest] = []
        longest = 0
        with self._lock:
            while self._waiting and len(group) < rows:
                longest = max(longest, len(self._waiting[0].target))
                if group and longest * (len(group) + 1) > MOST_TOKENS:
                    break
                group.append(self._waiting.popleft())
        return group

    def _run(self, group: Sequence[ScoringRequest]) -> None:
        sources = [request.source for request in group if request.source is not None]
        try:
            scores = self._backend.score_batch(
                sources or None, [request.target for request in group], [request.labels for request in group]
            )
        except Exception as error:
            if len(group) > 1:  # one of them is at fault
                for request in group:
                    self._run([request])
                return
            if isinstance(error, RequestError):
                return group[0].resolve(error)
            log.exception("scoring a text failed")
            return group[0].resolve(ComputeError("the text could not be scored"))
        for request, values in zip(group, scores, strict=True):
            request.resolve(tuple(values.tolist()))
