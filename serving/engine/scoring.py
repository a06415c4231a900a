"""Scoring given texts by the teacher-forced graph, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from beamline.serving.contract.backend import Backend
from beamline.serving.contract.call import DEFAULT_PRIORITY
from beamline.serving.contract.stats import Finished, Outcome
from beamline.serving.engine.admission import Admission
from beamline.serving.engine.dropped import DROPPED
from beamline.serving.engine.queue import Inbox
from beamline.serving.engine.request import next_id
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.errors import ComputeError, RequestError

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
    deadline: float | None = None  # on the engine's clock
    priority: int = DEFAULT_PRIORITY  # 0 is most urgent
    queue_deadline: float | None = None  # by when it must run
    id: int = field(default_factory=next_id)
    submitted: float = 0.0


class Scoring:
    """A queue of its own, with the rules of the other one: bounded, by urgency and age, with deadlines. `submit`,
    `close` and `len` may be called from any thread; the rest is the engine's. `finished` is told of all who leave."""

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float],
        admission: Admission,
        finished: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._finished = finished
        self._scheduler: Scheduler[ScoringRequest] = Scheduler(_MOST_ROWS)
        self._behind_since: float | None = None  # when the last run ended, if it left others waiting
        self._inbox: Inbox[ScoringRequest] = Inbox(admission)

    def __len__(self) -> int:
        return self._inbox.waiting

    def submit(self, request: ScoringRequest) -> None:
        """Raises `Overloaded`, or `ShuttingDown` once it is closed."""
        request.submitted = self._clock()
        self._inbox.submit(request, request.submitted)

    def close(self) -> None:
        self._inbox.close()

    def cancel(self, request_id: int) -> None:
        self._take_in()
        self._scheduler.cancel(request_id)

    def fail(self, error: Exception) -> None:
        self._take_in()
        while group := self._take(_MOST_ROWS):
            for request in group:
                self._resolve(request, error, Outcome.FAILED, self._clock())

    def advance(self, others_wait: bool) -> None:
        """Scores some: while others decode, one text; else as many of similar kind as make one run."""
        self._take_in()
        began = self._clock()
        for dropped in self._scheduler.sweep(began):
            error, outcome = DROPPED[dropped.reason]
            self._inbox.left([dropped.request])
            self._resolve(dropped.request, error(), outcome, began)
        group = self._take(1 if others_wait else _MOST_ROWS)
        if group:
            self._run(group, began)
            self._measure(began, len(group))

    def _take_in(self) -> None:
        for request in self._inbox.take().arrived:
            self._scheduler.submit(request)

    def _take(self, rows: int) -> list[ScoringRequest]:
        group = self._scheduler.take_together(lambda request: len(request.target), MOST_TOKENS, rows)
        self._inbox.left(group)
        return group

    def _measure(self, began: float, texts: int) -> None:
        """What a text costs those who wait: the steps between two runs count."""
        ended = self._clock()
        self._inbox.served((ended - (self._behind_since or began)) / texts)
        self._behind_since = ended if self._inbox.waiting else None

    def _resolve(
        self, request: ScoringRequest, answer: tuple[float, ...] | Exception, outcome: Outcome, began: float
    ) -> None:
        self._finished(
            Finished(
                outcome=outcome,
                queue_seconds=began - request.submitted,
                first_token_seconds=None,
                total_seconds=self._clock() - request.submitted,
                source_tokens=len(request.source or ()) + len(request.target),  # all of them are read
                target_tokens=0,
            )
        )
        try:
            request.resolve(answer)
        except Exception:
            log.exception("nobody took the answer to request %d", request.id)

    def _run(self, group: Sequence[ScoringRequest], began: float) -> None:
        sources = [request.source for request in group if request.source is not None]
        try:
            scores = self._backend.score_batch(
                sources or None, [request.target for request in group], [request.labels for request in group]
            )
        except Exception as error:
            if len(group) > 1:  # one of them is at fault
                for request in group:
                    self._run([request], began)
                return
            if not isinstance(error, RequestError):
                log.exception("scoring a text failed")
                error = ComputeError("the text could not be scored")
            return self._resolve(group[0], error, Outcome.FAILED, began)
        for request, values in zip(group, scores, strict=True):
            self._resolve(request, tuple(values.tolist()), Outcome.OK, began)
