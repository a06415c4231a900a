"""The engine of a model that reads and does not write: a request is one row of one run, and is answered then.

It is driven as `Engine` is, by the same thread, and has the same queue: bounded, in order, with deadlines and
cancellation. What waits together runs together.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from beamline.serving.contract.backend import Floats, PooledBackend
from beamline.serving.contract.call import DEFAULT_PRIORITY
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.contract.stats import Finished, Outcome, StepStats
from beamline.serving.engine.admission import Admission
from beamline.serving.engine.dropped import DROPPED
from beamline.serving.engine.queue import Inbox
from beamline.serving.engine.request import Timings
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.errors import ComputeError

log = logging.getLogger(__name__)

RUN_TOKENS = 4096  # of one run, padding included: a model beside this one never waits long for its turn
_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Pooled:
    """What the graph found for one request, by the names of its outputs."""

    outputs: Mapping[str, Floats]
    timings: Timings


@dataclass(eq=False, slots=True)
class PooledRequest:
    """One text to read. `resolve` is called exactly once, on the engine's thread."""

    source: tuple[int, ...]
    resolve: Callable[[Pooled | Exception], None]
    deadline: float | None = None  # on the engine's clock
    priority: int = DEFAULT_PRIORITY  # 0 is most urgent
    queue_deadline: float | None = None  # by when it must run
    id: int = field(default_factory=lambda: next(_ids))
    submitted: float = 0.0


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
        self.wake: Callable[[], None] = lambda: None  # set by the thread that drives us
        self._backend = backend
        self._clock = clock
        self._scheduler: Scheduler[PooledRequest] = Scheduler(rows)
        self._finished: list[Finished] = []
        self._inbox: Inbox[PooledRequest] = Inbox(Admission(manifest.name, rows, max_queue, early_refusal))

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: PooledRequest) -> None:
        request.submitted = self._clock()
        self._inbox.submit(request, request.submitted)
        self.wake()

    def cancel(self, request_id: int) -> None:
        self._inbox.cancel(request_id)
        self.wake()

    def drain(self) -> None:
        """Refuses new work from now on; what is here is finished."""
        self._inbox.close()
        self.wake()

    @property
    def busy(self) -> bool:
        return self._inbox.busy

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> StepStats:
        """One run for those who have waited longest."""
        began = self._clock()
        self._finished = []
        self._take_in(began)
        batch = self._next_batch()
        if batch:
            self._run(batch)
        seconds = self._clock() - began
        stats = StepStats(
            slots=self.rows,
            active=len(batch),
            remaining=0,
            queued=self._scheduler.waiting,
            beam_width=0,
            cache_length=0,
            source_length=max((len(request.source) for request in batch), default=0),
            live_entries=0,
            admitted=len(batch),
            encode_seconds=seconds if batch else 0.0,
            decode_seconds=0.0,
            step_seconds=seconds,
            moves=0,
            relayouts=0,
            compactions=0,
            finished=tuple(self._finished),
        )
        self.observe(stats)
        return stats

    def fail_everything(self, error: Exception) -> None:
        """Answers everybody who is here with an error. The engine itself can go on."""
        self._take_in(self._clock())
        while batch := self._next_batch():
            for request in batch:
                self._resolve(request, error, Outcome.FAILED, self._clock())

    def _take_in(self, now: float) -> None:
        post = self._inbox.take()
        for request in post.arrived:
            self._scheduler.submit(request)
        for request_id in post.cancelled:
            self._scheduler.cancel(request_id)
        for dropped in self._scheduler.sweep(now):
            error, outcome = DROPPED[dropped.reason]
            self._inbox.left([dropped.request])
            self._resolve(dropped.request, error(), outcome, now)

    def _next_batch(self) -> list[PooledRequest]:
        batch = self._scheduler.take_together(lambda request: len(request.source), RUN_TOKENS)
        self._inbox.left(batch)
        return batch

    # -- running -------------------------------------------------------------------------------------------------

    def _run(self, batch: Sequence[PooledRequest]) -> None:
        began = self._clock()
        for group in groups(batch):
            self._run_group(group, began)

    def _run_group(self, group: Sequence[PooledRequest], began: float) -> None:
        try:
            outputs = self._backend.run([request.source for request in group])
        except Exception:
            log.exception("a run of %s failed for %d requests", self.manifest.name, len(group))
            if len(group) == 1:
                self._resolve(group[0], ComputeError("the model failed"), Outcome.FAILED, began)
                return
            for request in group:  # one of them is at fault: alone, the others succeed
                self._run_group([request], began)
            return
        seconds = self._clock() - began
        self._inbox.served(seconds)
        for row, request in enumerate(group):
            found = {name: values[row] for name, values in outputs.items()}
            if not all(np.isfinite(values).all() for values in found.values()):
                log.error("request %d of %s: the model's outputs are not numbers", request.id, self.manifest.name)
                error = ComputeError("the model's outputs are not numbers")
                self._resolve(request, error, Outcome.FAILED, began)
                continue
            timings = Timings(queue=began - request.submitted, encode=seconds)
            self._resolve(request, Pooled(found, timings), Outcome.OK, began)

    def _resolve(self, request: PooledRequest, answer: Pooled | Exception, outcome: Outcome, began: float) -> None:
        now = self._clock()
        self._finished.append(
            Finished(
                outcome=outcome,
                queue_seconds=began - request.submitted,
                first_token_seconds=None,
                total_seconds=now - request.submitted,
                source_tokens=len(request.source),
                target_tokens=0,
            )
        )
        try:
            request.resolve(answer)
        except Exception:
            log.exception("nobody took the answer to request %d", request.id)


def groups(batch: Sequence[PooledRequest]) -> Iterator[list[PooledRequest]]:
    """Of similar length, so that little is computed for padding."""
    group: list[PooledRequest] = []
    for request in sorted(batch, key=lambda request: len(request.source)):
        if group and len(request.source) > 2 * len(group[0].source) + 8:
            yield group
            group = []
        group.append(request)
    if group:
        yield group
