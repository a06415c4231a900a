"""How newcomers become ready for a slot: what a model must know of a request before its first step.

An encoder-decoder model encodes its source, at once. A decoder-only model takes in its prompt, see `prompts.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from beamline.serving.contract.backend import Backend
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.engine.sequence import Job, groups_by_length
from beamline.serving.errors import ComputeError

log = logging.getLogger(__name__)

ENCODE_TOKENS = 1024  # source tokens that are encoded between two steps: decoding never waits long

Taken = Callable[[Sequence[Job]], None]  # out of the queue
Fail = Callable[[Job, Exception], None]


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can have its slot."""

    job: Job
    memory: Any  # the backend's


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What was taken in of prompts since the last report."""

    tokens: int = 0
    cached_tokens: int = 0  # of them, already known
    cache_bytes: int = 0


class Intake(Protocol):
    def advance(self, scheduler: Scheduler[Job], busy: bool) -> list[Ready]:
        """What there is time for between two steps: takes newcomers out of the queue, and returns who is ready.
        `busy`: something else has taken time already."""

    def stepped(self, seconds: float) -> None:
        """How long a step took: what there is time for."""

    def report(self) -> PromptCounts: ...


class EncoderIntake:
    def __init__(self, backend: Backend, taken: Taken, fail: Fail) -> None:
        self._backend = backend
        self._taken = taken
        self._fail = fail

    def advance(self, scheduler: Scheduler[Job], busy: bool) -> list[Ready]:
        newcomers = self._newcomers(scheduler)
        self._taken(newcomers)
        groups = groups_by_length(newcomers, ENCODE_TOKENS)
        return [ready for group in groups for ready in self._encode(group)]

    def stepped(self, seconds: float) -> None:
        pass

    def report(self) -> PromptCounts:
        return PromptCounts()

    def _newcomers(self, scheduler: Scheduler[Job]) -> list[Job]:
        """Whom to encode now: as many as there is room for, but while others decode, no more than keeps them waiting
        for a moment."""
        if not scheduler.active:
            return scheduler.next_in_line()
        tokens = 0

        def fits(job: Job) -> bool:
            nonlocal tokens
            tokens += job.source_length
            return tokens <= ENCODE_TOKENS or tokens == job.source_length

        return scheduler.next_in_line(fits)

    def _encode(self, group: Sequence[Job]) -> list[Ready]:
        try:
            memories = self._backend.encode([job.request.reads for job in group])
            return [Ready(job, memory) for job, memory in zip(group, memories, strict=True)]
        except Exception:
            log.exception("encoding failed for a group of %d", len(group))
            if len(group) == 1:
                self._fail(group[0], ComputeError("the encoder failed"))
                return []
        # One of them is at fault: alone, the others succeed.
        return [ready for job in group for ready in self._encode([job])]
