"""What a model must compute of a request before its first decode step.

An encoder-decoder model encodes its source, at once (here). A decoder-only model computes the KV cache of its prompt,
by the chunk (`chunked_prefill.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from beamline.serving.contract.backend import Backend
from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.outputs import out_of_memory
from beamline.serving.engine.request import OutputCollector, Request, groups_by_length
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.errors import ComputeError, DeviceLost, OutOfMemory

log = logging.getLogger(__name__)

ENCODE_TOKENS = 1024  # source tokens that are encoded between two steps: decoding never waits long


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can have its slot."""

    request: Request
    memory: Any  # the backend's


@dataclass(frozen=True, slots=True)
class PrefillCounts:
    """What was computed of prompts since the last report."""

    tokens: int = 0
    cached_tokens: int = 0  # of them, found in the prefix cache
    cache_bytes: int = 0


class Prefill(Protocol):
    def advance(self, scheduler: Scheduler[Request], busy: bool) -> list[Ready]:
        """What there is time for between two steps: admits newcomers from the queue, and returns those who are ready.
        `busy`: something else has taken time already."""

    def stepped(self, seconds: float) -> None:
        """How long a decode step took: what there is time for."""

    def report(self) -> PrefillCounts: ...


def could_not_prepare(
    request: Request, error: Exception, scheduler: Scheduler[Request], outputs: OutputCollector
) -> None:
    scheduler.give_up(request)
    outputs.answer(request, error, Outcome.FAILED)


class EncoderPrefill:
    def __init__(self, backend: Backend, outputs: OutputCollector) -> None:
        self._backend = backend
        self._outputs = outputs

    def advance(self, scheduler: Scheduler[Request], busy: bool) -> list[Ready]:
        groups = groups_by_length(self._admit(scheduler), lambda request: request.source_length, ENCODE_TOKENS)
        return [ready for group in groups for ready in self._encode(group, scheduler)]

    def stepped(self, seconds: float) -> None:
        pass

    def report(self) -> PrefillCounts:
        return PrefillCounts()

    def _admit(self, scheduler: Scheduler[Request]) -> list[Request]:
        """As many as there are slots for; but while others decode, no more than keeps them waiting for a moment."""
        if not scheduler.active:
            return scheduler.admit()
        tokens = 0

        def fits(request: Request) -> bool:
            nonlocal tokens
            tokens += request.source_length
            return tokens <= ENCODE_TOKENS or tokens == request.source_length

        return scheduler.admit(fits)

    def _encode(self, group: Sequence[Request], scheduler: Scheduler[Request]) -> list[Ready]:
        try:
            memories = self._backend.encode([request.encoder_input for request in group])
            return [Ready(request, memory) for request, memory in zip(group, memories, strict=True)]
        except DeviceLost:
            raise
        except OutOfMemory as error:
            log.error("there is too little memory to encode a group of %d: %s", len(group), error)
            if len(group) == 1:
                could_not_prepare(group[0], out_of_memory(), scheduler, self._outputs)
                return []
        except Exception:
            log.exception("encoding failed for a group of %d", len(group))
            if len(group) == 1:
                could_not_prepare(group[0], ComputeError("the encoder failed"), scheduler, self._outputs)
                return []
        # One of them is at fault: alone, the others succeed.
        return [ready for request in group for ready in self._encode([request], scheduler)]
