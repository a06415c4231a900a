"""Requests that one run answers: scored texts, and what classifiers and embedders read. No slots, no steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.outputs import Answer, out_of_memory
from beamline.serving.engine.queue import WorkQueue
from beamline.serving.engine.request import OutputCollector, Request, groups_by_length
from beamline.serving.errors import ComputeError, DeviceLost, OutOfMemory, RequestError

log = logging.getLogger(__name__)


class OneShotExecutor:
    """Takes what waits together and runs it together. Where a run fails, each of its requests is run alone, so that
    only the one at fault fails."""

    def __init__(
        self,
        queue: WorkQueue[Request],
        run: Callable[[Sequence[Request]], Sequence[Answer]],
        length: Callable[[Request], int],
        outputs: OutputCollector,
        clock: Callable[[], float],
        *,
        most_rows: int,
        most_tokens: int,  # of one run, padding included
        longer: float,  # a run's longest text is at most so many times its shortest, and a few tokens
        failure: str,  # what a request is answered that fails for no reason of its own
    ) -> None:
        self._queue = queue
        self._run = run
        self._length = length
        self._outputs = outputs
        self._clock = clock
        self._most_rows = most_rows
        self._most_tokens = most_tokens
        self._longer = longer
        self._failure = failure
        self._running: list[Request] = []  # taken from the queue, and not answered yet

    def sweep(self, now: float) -> None:
        """Cancellations and deadlines."""
        for dropped in self._queue.sweep(now, self._queue.take_cancelled()):
            self._outputs.answer(dropped.request, dropped.error(), dropped.outcome)

    def advance(self, most_rows: int | None = None) -> list[Request]:
        """Answers as many as make one run, and returns them."""
        batch = self._queue.pop_batch(most_rows or self._most_rows, self._length, self._most_tokens)
        began = self._clock()
        for request in batch:
            request.started = began
        self._running = list(batch)
        for group in groups_by_length(batch, self._length, self._most_tokens, self._longer):
            self._answer(group)
        return batch

    def fail_everything(self, error: Exception) -> None:
        """Those who wait, and those whose run did not come to an end: a lost device."""
        for request in (*self._running, *self._queue.pop(self._queue.waiting)):
            self._outputs.answer(request, error, Outcome.FAILED)
        self._running = []

    def _answer(self, group: Sequence[Request]) -> None:
        try:
            answers = self._run(group)
        except DeviceLost:
            raise
        except Exception as error:
            if len(group) > 1:  # one of them is at fault: alone, the others succeed
                for request in group:
                    self._answer([request])
                return
            if isinstance(error, OutOfMemory):
                log.error("request %d: %s", group[0].id, error)
                error = out_of_memory()
            elif not isinstance(error, RequestError):
                log.exception("request %d: %s", group[0].id, self._failure)
                error = ComputeError(self._failure)
            answers = [error]
        for request, answer in zip(group, answers, strict=True):
            outcome = Outcome.FAILED if isinstance(answer, Exception) else Outcome.OK
            self._outputs.answer(request, answer, outcome)
            self._running.remove(request)
