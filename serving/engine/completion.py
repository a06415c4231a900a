"""How a request gets its slot and leaves it, with its answer or an error. The last slot moves into a freed one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from beamline.serving.contract.backend import Backend
from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.outputs import Answer, Result, Timings, out_of_memory
from beamline.serving.engine.queue import WorkQueue
from beamline.serving.engine.request import OutputCollector, Request
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.engine.scoring import aligned
from beamline.serving.errors import ComputeError, DeviceLost, InvalidRequest, OutOfMemory

log = logging.getLogger(__name__)

FAILED_ALONE = "the request could not be processed; others were not affected"


@dataclass(frozen=True, slots=True)
class Occupied:
    """A slot that a running request has, or had before it moved."""

    slot: int
    since: float  # on the engine's clock
    until: float | None  # None: it has it now
    beams: int
    tokens: int  # generated so far


class Completion:
    def __init__(
        self,
        name: str,
        backend: Backend,
        queue: WorkQueue[Request],
        scheduler: Scheduler[Request],
        outputs: OutputCollector,
        clock: Callable[[], float],
    ) -> None:
        """`name` is the model's."""
        self.first_slot = 0  # how its own are numbered among those of the model's other engines
        self.moves = 0  # of slots into freed ones
        self._name = name
        self._backend = backend
        self._queue = queue
        self._scheduler = scheduler
        self._outputs = outputs
        self._clock = clock

    def occupied(self) -> list[Occupied]:
        """Who has a slot just now: a look from outside, for people."""
        found = []
        for request in list(self._scheduler.active):
            stays, search = list(request.stays), request.search
            ends = (*(since for _, since in stays[1:]), None)
            found += [
                Occupied(*stay, end, search.width, search.generated) for stay, end in zip(stays, ends, strict=False)
            ]
        return found

    def start(self, request: Request, now: float) -> int:
        """The slot that it gets."""
        slot = self._scheduler.start(request)
        request.stays.append((self.first_slot + slot, now))
        return slot

    def answer(self, slot: int) -> None:
        """Its search is over."""
        request = self._scheduler.active[slot]
        try:
            hypotheses = request.search.hypotheses()
        except Exception:
            return self.fail_alone(slot)
        if not hypotheses:
            error = InvalidRequest("the options forbid every possible output; allow more words or a longer output")
            return self.finish(slot, error, Outcome.FAILED)
        try:
            if request.search.options.return_alignment:
                start = request.search.start_token
                hypotheses = tuple(aligned(self._backend, request, each, start) for each in hypotheses)
        except DeviceLost:
            raise
        except OutOfMemory as error:
            log.error("request %d of %s is refused its alignment: %s", request.id, self._name, error)
            return self.finish(slot, out_of_memory(), Outcome.FAILED)
        except Exception:
            log.exception("aligning request %d failed", request.id)
            return self.finish(slot, ComputeError("the alignment failed"), Outcome.FAILED)
        timings = Timings(
            queue=request.started - request.submitted,
            encode=request.encode_seconds,
            decode=self._clock() - request.started - request.encode_seconds,
        )
        self._queue.served(timings.encode + timings.decode)
        self.finish(slot, Result(hypotheses, timings, request.cached_tokens, request.search.trace()), Outcome.OK)

    def fail_alone(self, slot: int) -> None:
        """What the engine did for one request failed: its neighbours go on as if it had never been there."""
        request = self._scheduler.active[slot]
        log.exception("request %d of %s failed", request.id, self._name)
        self._backend.zero(slot)
        self.finish(slot, ComputeError(FAILED_ALONE), Outcome.FAILED)

    def fail_broken(self, slot: int) -> None:
        """The model computed no numbers for it: what stands in its slot must not reach the next one."""
        log.error("request %d of %s: the model's scores are NaN", self._scheduler.active[slot].id, self._name)
        self._backend.zero(slot)
        self.finish(slot, ComputeError("the model's scores are not numbers"), Outcome.FAILED)

    def fail_all(self, error: Exception) -> None:
        while self._scheduler.active:
            slot = len(self._scheduler.active) - 1
            self._backend.zero(slot)
            self.finish(slot, error, Outcome.FAILED)

    def abandon_all(self, error: Exception) -> None:
        """Without the device, which is lost."""
        while self._scheduler.active:
            request = self._scheduler.active[-1]
            self._scheduler.release(len(self._scheduler.active) - 1)
            self._outputs.answer(request, error, Outcome.FAILED)

    def finish(self, slot: int, answer: Answer, outcome: Outcome) -> None:
        """Frees the slot and answers the request that had it."""
        request = self._scheduler.active[slot]
        moved = self._scheduler.release(slot)
        self._outputs.answer(request, answer, outcome)  # before the device is asked for anything, which may fail
        if moved is not None:
            self._move(moved, slot)

    def _move(self, source: int, target: int) -> None:
        """The last slot into the one that was freed; where that fails, it costs the request that had it."""
        try:
            self._backend.move(source, target)
        except DeviceLost:
            raise
        except Exception:
            return self.fail_alone(target)
        self.moves += 1
        self._scheduler.active[target].stays.append((self.first_slot + target, self._clock()))
