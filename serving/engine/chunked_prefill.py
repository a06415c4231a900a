"""Chunked prefill: prompts are computed by the chunk between decode steps, so that a long one never stalls the others.
Whatever takes time (a chunk, memory for more of it, a place in the batch) has a step before and after it.

All tokens but a prompt's last go through the prefill graph, into memory of their own; the last one is the input of the
request's first step. Prompts of similar length that come together are computed together, a row each.

Remembered prompts have what memory is left: before a request is refused for want of it, they are forgotten.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from beamline.serving.contract.backend import Backend, PromptChunk, TimedBackend
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.outputs import out_of_memory
from beamline.serving.engine.prefill import could_not_prepare
from beamline.serving.engine.prefix_cache import Known, PrefixCache
from beamline.serving.engine.request import OutputCollector, Request
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.errors import ComputeError, DeviceLost, OutOfMemory

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LARGEST_CHUNK = 512  # tokens, over all rows
_SMALLEST_CHUNK = 4  # on a CPU they take as long as one: the weights are read once
_GROUP_TOKENS = 1024
_GROUP_ROWS = 16


class Pace:
    """How many tokens of prompts go between two steps: as many as let a running stream's gap become `slowdown` times
    what it is without them, but never fewer than a few. By the device's clock, where the host does not wait for it."""

    def __init__(self, slowdown: float) -> None:
        self._chunk_per_step = slowdown - 1  # the rest of the gap is the step itself
        self._tokens = float(_SMALLEST_CHUNK)
        self._step_seconds = 0.0

    def stepped(self, seconds: float) -> None:
        """Steps get longer with the batch; one odd one must not count for much."""
        self._step_seconds += (seconds - self._step_seconds) * (0.2 if self._step_seconds else 1.0)

    def took(self, tokens: int, seconds: float) -> None:
        """A chunk's time is no multiple of its tokens (the weights are read once), so the way there is by trying. One
        that was larger, because nobody waited, says little of that; and a smaller one, the rest of a prompt, only
        whether even that was too much."""
        if not self._step_seconds or seconds <= 0 or tokens > self._tokens:
            return
        change = min(2.0, max(0.5, self._chunk_per_step * self._step_seconds / seconds))
        wanted = tokens * change if change < 1 else max(tokens * change, self._tokens)
        self._tokens = min(float(LARGEST_CHUNK), max(float(_SMALLEST_CHUNK), wanted))

    def tokens(self, others_wait: bool) -> int:
        return int(self._tokens) if others_wait else LARGEST_CHUNK


@dataclass(slots=True)
class _Group:
    requests: list[Request]
    prompts: list[tuple[int, ...]]  # without their last tokens
    done: list[int]  # how much of each is taken in
    memories: list[Any]
    chunks: int = 0  # that were taken in

    @property
    def remaining(self) -> int:
        return max(len(prompt) - done for prompt, done in zip(self.prompts, self.done, strict=True))

    def chunk(self, length: int) -> PromptChunk:
        """The next tokens of every row. One that has fewer begins earlier, and computes some once more; one that is
        shorter than this altogether is padded, behind its end, where nobody looks."""
        starts = [min(done, max(0, len(prompt) - length)) for prompt, done in zip(self.prompts, self.done, strict=True)]
        tokens = np.zeros((len(self.requests), length), np.int64)
        for row, (prompt, start) in enumerate(zip(self.prompts, starts, strict=True)):
            part = prompt[start : start + length]
            tokens[row, : len(part)] = part
        return PromptChunk(tokens, np.array(starts, np.int64))

    def trim(self, wanted: Callable[[Request], bool]) -> _Group:
        """Without those who have left at either end: rows lie together, so the others stay. Somebody must be wanted."""
        here = [row for row, request in enumerate(self.requests) if wanted(request)]
        _, rest = self.split(here[0])
        return rest.split(here[-1] + 1 - here[0])[0]

    def split(self, rows: int) -> tuple[_Group, _Group]:
        """The first rows, and the others."""
        first, rest = slice(rows), slice(rows, None)
        return (
            _Group(self.requests[first], self.prompts[first], self.done[first], self.memories[first], self.chunks),
            _Group(self.requests[rest], self.prompts[rest], self.done[rest], self.memories[rest], self.chunks),
        )

    def took(self, length: int) -> None:
        self.chunks += 1
        self.done = [min(len(prompt), done + length) for prompt, done in zip(self.prompts, self.done, strict=True)]


class ChunkedPrefill:
    def __init__(
        self, backend: Backend, outputs: OutputCollector, clock: Callable[[], float], cache: PrefixCache, pace: Pace
    ) -> None:
        self._backend = backend
        self._timed = backend if isinstance(backend, TimedBackend) else None
        self._outputs = outputs
        self._clock = clock
        self._groups: list[_Group] = []
        self._complete: list[Request] = []
        self._cache = cache
        self._pace = pace
        self._tokens = 0
        self._cached_tokens = 0

    def advance(self, scheduler: Scheduler[Request], busy: bool) -> list[Request]:
        newcomers = scheduler.admit()
        complete, self._complete = self._complete, []
        ready = self._begin(newcomers, scheduler) + complete
        self._groups = [group for group in self._groups if any(map(scheduler.is_preparing, group.requests))]
        others_wait = bool(scheduler.active)
        if self._groups and not (others_wait and (busy or complete)):
            ready += self._take_turn(scheduler, others_wait)
        return [request for request in ready if scheduler.is_preparing(request)]

    def _take_turn(self, scheduler: Scheduler[Request], others_wait: bool) -> list[Request]:
        """A chunk of the first group, and who is ready now."""
        group = self._groups.pop(0)  # in turn, so that a short prompt does not wait for all of a long one
        budget = self._pace.tokens(others_wait)
        rows = max(1, budget // _SMALLEST_CHUNK)
        group = group.trim(scheduler.is_preparing)  # so that either part of a split has somebody who is still here
        if len(group.requests) > rows:  # all of them at once would take too long
            group, rest = group.split(rows)
            self._groups.append(rest)
        # All of it may be in already, where the longer ones of a group have just been split off.
        if group.remaining and not self._compute(scheduler, group, budget, others_wait):
            return []
        if group.remaining:
            self._groups.append(group)
            return []
        ready = self._completed(group)
        if group.chunks == 1 or not others_wait:
            return ready
        self._complete = ready  # a place for a long one takes time, too
        return []

    def stepped(self, seconds: float) -> None:
        if self._timed is None:
            self._pace.stepped(seconds)
            return
        times = self._timed.device_times()
        self._pace.stepped(times.step_seconds)
        for chunk in times.chunks:
            self._pace.took(chunk.tokens, chunk.seconds)

    def report(self, stats: StepStats) -> None:
        stats.prompt_tokens, stats.cached_prompt_tokens = self._tokens, self._cached_tokens
        stats.prefix_cache_bytes = self._cache.size
        self._tokens = self._cached_tokens = 0

    def give_back(self, scheduler: Scheduler[Request]) -> bool:
        """Of prompts that are remembered: those that wait in the queue have none, they are computed when admitted."""
        before = len(self._cache)
        if not self._cache.forget_some():
            return False
        log.info("%d remembered prompts are given up for want of memory", before - len(self._cache))
        return True

    def _with_room(self, scheduler: Scheduler[Request], work: Callable[[], Answer]) -> Answer:
        """It is tried again for as long as there is something to forget, if there is too little memory for it."""
        while True:
            try:
                return work()
            except OutOfMemory:
                if not self.give_back(scheduler):
                    raise

    def clear(self) -> None:
        self._groups.clear()
        self._complete.clear()

    def _begin(self, newcomers: Sequence[Request], scheduler: Scheduler[Request]) -> list[Request]:
        """Looks up what is known of each prompt, and groups the rest."""
        ready, work = [], list[tuple[Request, Known | None]]()
        for request in newcomers:
            prompt = request.source[:-1]
            request.started = self._clock()
            known = self._cache.find(prompt, request.tenant)
            request.cached_tokens = _length(known)
            self._tokens += len(prompt) + 1
            if request.cached_tokens < len(prompt):
                work.append((request, known))
                continue
            try:
                request.memory = self._with_room(scheduler, partial(self._memory_of, prompt, known))
            except DeviceLost:
                raise
            except Exception as error:
                self._give_up(request, scheduler, error)
                continue
            request.cached_tokens = _length(known)
            if request.memory is None:
                work.append((request, None))
            else:
                self._cached_tokens += request.cached_tokens
                ready.append(request)
        for group in _grouped(work):
            self._open(group, scheduler)
        return ready

    def _memory_of(self, prompt: tuple[int, ...], known: Known | None) -> Any:
        """Of a prompt of which nothing is left to compute: it is known, or has no tokens before its last. None where it
        has been forgotten, to make room for this."""
        if not prompt:
            return self._backend.prompts([0], [None])[0]
        return None if known is None or not known.length else self._backend.prefix(known.memory, known.length)[0]

    def _open(self, group: Sequence[tuple[Request, Known | None]], scheduler: Scheduler[Request]) -> None:
        """Gives a group its memory; where that fails for several, each is tried alone."""
        requests = [request for request, _ in group]
        prompts = [request.source[:-1] for request in requests]

        def memories_for() -> list[Any]:
            known = [(each.memory, each.length) if each is not None and each.length else None for _, each in group]
            return self._backend.prompts([len(prompt) for prompt in prompts], known)

        try:
            memories = self._with_room(scheduler, memories_for)
        except DeviceLost:
            raise
        except Exception as error:
            if len(group) == 1:
                return self._give_up(requests[0], scheduler, error)
            for each in group:
                self._open([each], scheduler)
            return
        for request, known in group:
            request.cached_tokens = _length(known)
            self._cached_tokens += request.cached_tokens
        self._groups.append(_Group(requests, prompts, [request.cached_tokens for request in requests], memories))

    def _give_up(self, request: Request, scheduler: Scheduler[Request], error: Exception) -> None:
        if not scheduler.is_preparing(request):  # it has its answer
            return
        log.exception("the prompt of request %d could not be processed", request.id)
        known = out_of_memory() if isinstance(error, OutOfMemory) else ComputeError("the prompt could not be processed")
        could_not_prepare(request, known, scheduler, self._outputs)

    def _compute(self, scheduler: Scheduler[Request], group: _Group, budget: int, others_wait: bool) -> bool:
        """A chunk of it; whether that was done."""
        rows = len(group.requests)
        length = min(group.remaining, max(_SMALLEST_CHUNK, budget // rows))
        chunk = group.chunk(length)
        try:
            entries = int(chunk.starts.max()) + length
            while not self._with_room(scheduler, partial(self._backend.grow, group.memories, entries)):
                if others_wait:
                    self._groups.insert(0, group)
                    return False
            began = self._clock()
            self._with_room(scheduler, partial(self._backend.take_in, group.memories, chunk))
        except DeviceLost:
            raise
        except Exception as error:
            log.info("computing a chunk of %d prompts failed", rows)
            self._isolate(scheduler, group, error)
            return False
        if self._timed is None:
            self._pace.took(length * rows, self._clock() - began)
        group.took(length)
        return True

    def _isolate(self, scheduler: Scheduler[Request], group: _Group, error: Exception) -> None:
        """One of them may be at fault: alone, the others succeed."""
        if len(group.requests) == 1:
            return self._give_up(group.requests[0], scheduler, error)
        # The memory that they had is needed for this; also frames that the error has passed hold some of it.
        group.memories.clear()
        traceback.clear_frames(error.__traceback__)
        for request in filter(scheduler.is_preparing, group.requests):
            request.cached_tokens = 0
            self._open([(request, None)], scheduler)

    def _completed(self, group: _Group) -> list[Request]:
        for request, prompt, memory in zip(group.requests, group.prompts, group.memories, strict=True):
            self._remember(request.tenant, prompt, memory)
            request.memory = memory
        return group.requests

    def _remember(self, tenant: str, prompt: tuple[int, ...], memory: Any) -> None:
        """In the prefix cache. That is a favour to others: where there is no memory for it, nothing is lost."""
        try:
            if not self._cache.wants(prompt, tenant):
                return
            if self._backend.prefix_bytes(memory, len(prompt)) <= self._cache.limit:  # else a copy would be for nothing
                self._cache.put(prompt, *self._backend.prefix(memory, len(prompt)), tenant)
        except Exception:
            log.exception("a prompt could not be kept in the prefix cache")


def _grouped(work: Sequence[tuple[Request, Known | None]]) -> list[list[tuple[Request, Known | None]]]:
    """Prompts of which about as much remains, so that little is computed twice."""
    groups: list[list[tuple[Request, Known | None]]] = []
    for request, known in sorted(work, key=lambda each: _remaining(each[0])):
        group = groups[-1] if groups else []
        fits = group and _remaining(request) <= 1.5 * _remaining(group[0][0]) + 8
        if fits and len(group) < _GROUP_ROWS and _remaining(request) * (len(group) + 1) <= _GROUP_TOKENS:
            group.append((request, known))
        else:
            groups.append([(request, known)])
    return groups


def _length(known: Known | None) -> int:
    return 0 if known is None else known.length


def _remaining(request: Request) -> int:
    return request.source_length - 1 - request.cached_tokens
