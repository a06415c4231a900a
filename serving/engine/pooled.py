"""The engine of a model that classifies or embeds: a request is one row of one run, and is answered then.

It is driven as `Engine` is, by the same thread, and has the same queue. What waits together runs together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from beamline.serving.contract.backend import PooledBackend
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.one_shot import OneShotExecutor
from beamline.serving.engine.outputs import Answer, Pooled, Timings
from beamline.serving.engine.queue import Admission, WorkQueue
from beamline.serving.engine.request import OutputCollector, Request, RequestOutput
from beamline.serving.errors import ComputeError

log = logging.getLogger(__name__)

RUN_TOKENS = 4096  # of one run, padding included: a model beside this one never waits long for its turn


class PooledEngine:
    def __init__(
        self,
        manifest: PooledManifest,
        backend: PooledBackend,
        *,
        rows: int,
        max_queue: int,
        early_refusal: bool = True,
        observe: Callable[[StepStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.rows = rows
        self.observe = observe
        self.device: int | None = None  # the number of the GPU that it is on
        self.wake: Callable[[], None] = lambda: None  # set by the thread that drives us
        self._clock = clock
        self._queue: WorkQueue[Request] = WorkQueue(Admission(manifest.name, rows, max_queue, early_refusal))
        self._outputs = OutputCollector(clock)
        self._executor = OneShotExecutor(
            self._queue,
            _PooledRun(manifest.name, backend, self._queue, clock),
            lambda request: len(request.source),
            self._outputs,
            clock,
            most_rows=rows,
            most_tokens=RUN_TOKENS,
            longer=2.0,
            failure="the model failed",
        )

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        request.submitted = self._clock()
        self._queue.submit(request, request.submitted)
        self.wake()

    def cancel(self, request_id: int) -> None:
        self._queue.cancel(request_id)
        self.wake()

    def stop_hypothesis(self, request_id: int, index: int = 0) -> None:
        """There is nothing to cut short: a run answers all of it."""

    def drain(self) -> None:
        """Refuses new work from now on; what is here is finished."""
        self._queue.close()
        self.wake()

    @property
    def busy(self) -> bool:
        return self._queue.busy

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One run for those who have waited longest."""
        began = self._clock()
        self._executor.sweep(began)
        batch = self._executor.advance()
        seconds = self._clock() - began
        outputs, finished = self._outputs.take()
        self.observe(
            StepStats(
                slots=self.rows,
                active=len(batch),
                queued=self._queue.waiting,
                source_length=max((len(request.source) for request in batch), default=0),
                admitted=len(batch),
                encode_seconds=seconds if batch else 0.0,
                step_seconds=seconds,
                finished=finished,
            )
        )
        return outputs

    def fail_everything(self, error: Exception) -> list[RequestOutput]:
        """Answers everyone who is here with an error. The engine itself can go on."""
        self._executor.fail_everything(error)
        return self._outputs.take()[0]

    def abandon(self, error: Exception) -> list[RequestOutput]:
        """The same for good: the engine can't go on."""
        self.drain()
        return self.fail_everything(error)


class _PooledRun:
    """Does not know its engine: the two would keep each other, and the memory of an unloaded model would wait for a
    garbage collection."""

    def __init__(
        self, name: str, backend: PooledBackend, queue: WorkQueue[Request], clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._backend = backend
        self._queue = queue
        self._clock = clock

    def __call__(self, group: Sequence[Request]) -> list[Answer]:
        outputs = self._backend.run([request.source for request in group])
        seconds = self._clock() - group[0].started
        self._queue.served(seconds)
        answers: list[Answer] = []
        for row, request in enumerate(group):
            found = {name: values[row] for name, values in outputs.items()}
            if all(np.isfinite(values).all() for values in found.values()):
                answers.append(Pooled(found, Timings(queue=request.started - request.submitted, encode=seconds)))
            else:
                log.error("request %d of %s: the model's outputs are NaN or infinite", request.id, self._name)
                answers.append(ComputeError("the model's outputs are not numbers"))
        return answers
