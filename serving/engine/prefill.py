"""What happens to a request between the queue and its first decode step: it gets its memory, then its slot.

An encoder-decoder model encodes its source, at once (here). A decoder-only model computes the KV cache of its prompt,
by the chunk (`chunked_prefill.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from beamline.serving.contract.backend import Backend
from beamline.serving.contract.stats import Outcome, StepStats
from beamline.serving.engine.outputs import out_of_memory
from beamline.serving.engine.request import OutputCollector, Request, groups_by_length
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.errors import ComputeError, DeviceLost, OutOfMemory

log = logging.getLogger(__name__)

ENCODE_TOKENS = 1024  # newcomers' source tokens that are encoded between two steps: decoding never waits long
# Requests, and their tokens, that are worth a run of the encoder: for fewer, much of it is what any run takes.
_TOGETHER, _TOGETHER_TOKENS = 8, 256


class Prefill(Protocol):
    def advance(self, scheduler: Scheduler[Request], busy: bool) -> list[Request]:
        """What there is time for between two steps: admits newcomers from the queue, and returns those who have their
        memory now and can have a slot. `busy`: something else has taken time already."""

    def stepped(self, seconds: float) -> None:
        """How long a decode step took, by the host's clock: what there is time for."""

    def report(self, stats: StepStats) -> None:
        """Adds what was computed of prompts since the last time."""

    def give_back(self, scheduler: Scheduler[Request]) -> bool:
        """Where the device is full: whether there was any memory that nobody needs now, of requests that still wait in
        the queue, or of prompts that are remembered. It may be called again for more."""

    def clear(self) -> None:
        """Everybody has been answered: nothing of theirs is kept."""


def could_not_prepare(
    request: Request, error: Exception, scheduler: Scheduler[Request], outputs: OutputCollector
) -> None:
    scheduler.give_up(request)
    outputs.answer(request, error, Outcome.FAILED)


class EncoderPrefill:
    def __init__(self, backend: Backend, outputs: OutputCollector) -> None:
        self._backend = backend
        self._outputs = outputs

    def advance(self, scheduler: Scheduler[Request], busy: bool) -> list[Request]:
        admitted = self._admit(scheduler)
        coming = [request for request in admitted if request.memory is None]
        if coming:
            waiting = self._waiting(scheduler, coming)
            for group in groups_by_length([*coming, *waiting], _length, ENCODE_TOKENS):
                if any(scheduler.is_preparing(request) for request in group):
                    self._encode(group, scheduler)
        return [request for request in admitted if request.memory is not None]

    @staticmethod
    def _waiting(scheduler: Scheduler[Request], coming: Sequence[Request]) -> list[Request]:
        """Who is encoded with those who are coming, and keeps it in the queue: slots become free one by one."""
        found: list[Request] = []
        tokens = sum(map(_length, coming))
        for request in scheduler.peek(max(0, _TOGETHER - len(coming))):
            if request.memory is not None or request.encode_alone:
                continue
            tokens += request.source_length
            if tokens > _TOGETHER_TOKENS:
                break
            found.append(request)
        return found

    def stepped(self, seconds: float) -> None:
        pass

    def report(self, stats: StepStats) -> None:
        pass

    def give_back(self, scheduler: Scheduler[Request]) -> bool:
        encoded = [request for request in scheduler.peek() if request.memory is not None]
        for request in encoded:
            request.memory = None
        return bool(encoded)

    def clear(self) -> None:
        pass  # what was encoded is with its request

    def _admit(self, scheduler: Scheduler[Request]) -> list[Request]:
        """As many as there are slots for; but while others decode, no more than keeps them waiting for a moment."""
        if not scheduler.active:
            return scheduler.admit()
        tokens = 0

        def fits(request: Request) -> bool:
            nonlocal tokens
            if request.memory is not None:
                return True
            tokens += request.source_length
            return tokens <= ENCODE_TOKENS or tokens == request.source_length

        return scheduler.admit(fits)

    def _encode(self, group: Sequence[Request], scheduler: Scheduler[Request]) -> None:
        """Those who fail are answered, or, where they still wait, tried again in their turn."""
        try:
            memories = self._backend.encode([request.encoder_input for request in group])
            for request, memory in zip(group, memories, strict=True):
                request.memory = memory
            return
        except DeviceLost:
            raise
        except OutOfMemory as error:
            log.error("there is too little memory to encode a group of %d: %s", len(group), error)
            if not self.give_back(scheduler) and len(group) == 1:
                return could_not_prepare(group[0], out_of_memory(), scheduler, self._outputs)
        except Exception:
            log.exception("encoding failed for a group of %d", len(group))
            if len(group) == 1:
                return could_not_prepare(group[0], ComputeError("the encoder failed"), scheduler, self._outputs)
        # One of them is at fault, or all were too many: alone, the others succeed.
        for request in group:
            if scheduler.is_preparing(request):
                self._encode([request], scheduler)
            else:
                request.encode_alone = True


def _length(request: Request) -> int:
    return request.source_length


class Placement:
    """Requests on their way into a slot: what is large of theirs (a prompt's KV cache) is copied there by the part,
    while others run. `requests` are those that have their memory, and wait for a slot."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.requests: list[Request] = []
        # Of the first of them: the slot in which some of its entries stand already, and the copies that are left.
        self._slot = -1
        self._parts: Iterator[None] | None = None

    @property
    def rows(self) -> int:
        """How many slots, from the first, have to be kept for them."""
        return 0 if self._parts is None else self._slot + 1

    def add(self, ready: Sequence[Request]) -> None:
        self.requests += ready

    def keep(self, wanted: Callable[[Request], bool]) -> None:
        """The others have left."""
        if self.requests and not wanted(self.requests[0]):
            self.restart()
        self.requests = [request for request in self.requests if wanted(request)]

    def restart(self) -> None:
        """What stands in a slot already is lost."""
        self._parts = None

    def next(self, slot: int, others_run: bool) -> Request | None:
        """The first of them, when all of it stands in this slot. While others run, they have a step between two
        parts."""
        if not self.requests:
            return None
        if self._parts is None:
            self._slot, self._parts = slot, self._backend.fill(slot, self.requests[0].memory)
        for _ in self._parts:
            if others_run:
                return None
        if self._slot != slot:  # somebody has left since it began
            self._backend.move(self._slot, slot)
        self._parts = None
        return self.requests.pop(0)
