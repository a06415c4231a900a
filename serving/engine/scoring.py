"""The teacher-forced graph: texts are scored, with a queue of their own and a turn between two decode steps; and a
finished hypothesis gets its alignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from beamline.serving.contract.backend import Backend
from beamline.serving.engine.one_shot import OneShotExecutor
from beamline.serving.engine.outputs import Hypothesis, Scores
from beamline.serving.engine.queue import Admission, WorkQueue
from beamline.serving.engine.request import OutputCollector, Request
from beamline.serving.errors import OutOfMemory

MOST_TOKENS = 1024  # of one run, padding included
_MOST_ROWS = 32


class Scoring:
    """`queue` is for any thread; the rest is the engine's."""

    def __init__(
        self,
        backend: Backend,
        admission: Admission,
        outputs: OutputCollector,
        clock: Callable[[], float],
        give_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """`give_back`: some of what is kept without need; false where there is none of it any more."""
        self._clock = clock
        self._behind_since: float | None = None  # when the last run ended, if it left others waiting
        self.queue: WorkQueue[Request] = WorkQueue(admission)
        self._executor = OneShotExecutor(
            self.queue,
            partial(_score_or_make_room, backend, give_back),
            lambda request: len(request.target),
            outputs,
            clock,
            most_rows=_MOST_ROWS,
            most_tokens=MOST_TOKENS,
            longer=math.inf,
            failure="the text could not be scored",
        )

    def advance(self, others_wait: bool) -> None:
        """Scores some: while others decode, one text; else as many as make one run."""
        began = self._clock()
        self._executor.sweep(began)
        self._reset_waiting()
        scored = self._executor.advance(1 if others_wait else None)
        if scored:
            self._measure(began, len(scored))

    def fail_everything(self, error: Exception) -> None:
        self._executor.fail_everything(error)
        self._reset_waiting()

    def _reset_waiting(self) -> None:
        """Where those who were left waiting have gone: the next one does not wait since then."""
        if not self.queue.waiting:
            self._behind_since = None

    def _measure(self, began: float, texts: int) -> None:
        """What a text costs those who wait: the steps between two runs count."""
        ended = self._clock()
        self.queue.served((ended - (self._behind_since or began)) / texts)
        self._behind_since = ended if self.queue.waiting else None


def _score_or_make_room(backend: Backend, give_back: Callable[[], bool], group: Sequence[Request]) -> list[Scores]:
    try:
        return _score(backend, group)
    except OutOfMemory:
        if not give_back():
            raise
    while give_back():
        pass
    return _score(backend, group)


def _score(backend: Backend, group: Sequence[Request]) -> list[Scores]:
    sources = [request.source for request in group if request.source]
    targets, labels = [request.target for request in group], [request.labels for request in group]
    return [Scores(tuple(values.tolist())) for values in backend.score_batch(sources or None, targets, labels)]


def aligned(backend: Backend, request: Request, hypothesis: Hypothesis, start_token: int) -> Hypothesis:
    """With its attention to the source."""
    prefix = request.prefix
    scored = backend.score(request.encoder_input, (*prefix, *hypothesis.tokens), start_token)
    assert scored.attention is not None
    return replace(hypothesis, alignment=tuple(tuple(row) for row in scored.attention[len(prefix) :].tolist()))
