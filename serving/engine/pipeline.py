"""Running one step ahead: the device begins the next step while the host still looks at the last one.

A step's inputs are the outputs of the one before, and they are on the device already; what the host adds (a forced
word, words that are always forbidden, a random number) it knows beforehand. So the next step can be asked for before
the last one's results are there. Where a rule needs to see the words first (n-grams, repetition), or where somebody
joins or a cache is full, the host catches up first. A request that turns out to have ended has one surplus step, which
nobody looks at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from beamline.serving.contract.backend import Backend, Shape, StepInputs, StepOutputs
from beamline.serving.engine.sequence import Job


@runtime_checkable
class PipelinedBackend(Protocol):
    """A backend whose steps can be asked for and waited for apart."""

    def launch(self, inputs: StepInputs) -> None: ...

    def collect(self) -> StepOutputs: ...


class Flights:
    """The steps that were asked for and not yet looked at, and who took part in each."""

    def __init__(self, backend: Backend, run_ahead: bool) -> None:
        self._backend = backend
        self._pipelined = backend if run_ahead and isinstance(backend, PipelinedBackend) else None
        self._flights: deque[tuple[list[Job], StepInputs | None]] = deque()
        self.ahead = 0  # steps that were asked for before the one before was looked at

    @property
    def under_way(self) -> bool:
        return bool(self._flights)

    def launch(self, jobs: Sequence[Job], inputs: StepInputs) -> None:
        self.ahead += self.under_way
        if self._pipelined is None:
            self._flights.append((list(jobs), inputs))
        else:
            self._flights.append((list(jobs), None))
            self._pipelined.launch(inputs)

    def collect(self) -> tuple[list[Job], StepOutputs]:
        """The oldest step: who took part, by row, and what came out."""
        jobs, inputs = self._flights.popleft()
        if inputs is not None:
            return jobs, self._backend.run(inputs)
        assert self._pipelined is not None
        return jobs, self._pipelined.collect()

    def drop(self) -> None:
        """After a failure: nobody will look at what is under way."""
        self._flights.clear()
        reset = getattr(self._backend, "forget_launches", None)
        if reset is not None:
            reset()

    def may_follow(self, jobs: Sequence[Job], shape: Shape, somebody_waits: bool) -> bool:
        """Whether the step after the one that is under way can be asked for now."""
        if self._pipelined is None or somebody_waits or len(self._flights) != 1:
            return False
        flying = self._flights[0][0]
        if len(flying) != len(jobs) or any(a is not b for a, b in zip(flying, jobs, strict=True)):
            return False
        room = max(job.search.used_entries for job in jobs) + 2 * shape.beams <= shape.cache
        return room and all(_known_beforehand(job) for job in jobs)


def _known_beforehand(job: Job) -> bool:
    """Whether it has a step after the one that is under way, and the host's part of it does not depend on that one."""
    search = job.search
    return not job.rules.need_sequences and search.depth + 2 < search.options.max_length
