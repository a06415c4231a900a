"""The pipeline of steps: the device begins the next step while the host still looks at the last one.

A step's inputs are the outputs of the one before, and they are on the device already; what the host adds (a forced
word, words that are always forbidden, a random number) it knows beforehand. So the next step can be asked for before
the last one's results are there. Where a logits processor needs to see the tokens first (n-grams, repetition), or
where a request joins or a cache is full, the host catches up first. A request that turns out to have ended has one
surplus step, whose outputs are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from beamline.serving.contract.backend import Backend, PipelinedBackend, Shape, StepInputs, StepOutputs
from beamline.serving.engine.request import Request


class StepPipeline:
    """The steps that were asked for and not yet looked at, and who took part in each."""

    def __init__(self, backend: Backend, run_ahead: bool) -> None:
        self._backend = backend
        self._pipelined = backend if run_ahead and isinstance(backend, PipelinedBackend) else None
        self._steps: deque[tuple[list[Request], StepInputs | None]] = deque()

    @property
    def in_flight(self) -> bool:
        return bool(self._steps)

    def launch(self, requests: Sequence[Request], inputs: StepInputs) -> None:
        if self._pipelined is None:
            self._steps.append((list(requests), inputs))
        else:
            self._pipelined.launch(inputs)
            self._steps.append((list(requests), None))

    def collect(self) -> tuple[list[Request], StepOutputs]:
        """The oldest step: who took part, by row, and what came out."""
        requests, inputs = self._steps.popleft()
        if inputs is not None:
            return requests, self._backend.run(inputs)
        assert self._pipelined is not None
        return requests, self._pipelined.collect()

    def abandon(self) -> None:
        """What is in flight will never be there: the device is lost."""
        self._steps.clear()

    def drop(self) -> None:
        """After a failure: what is in flight is dropped."""
        self._steps.clear()
        if isinstance(self._backend, PipelinedBackend):
            self._backend.forget_launches()

    def may_follow(self, requests: Sequence[Request], shape: Shape, requests_wait: bool) -> bool:
        """Whether the step after the one in flight can be asked for now."""
        if self._pipelined is None or requests_wait or len(self._steps) != 1:
            return False
        running = self._steps[0][0]
        if len(running) != len(requests) or any(a is not b for a, b in zip(running, requests, strict=True)):
            return False
        fits = max(request.search.used_entries for request in requests) + 2 * shape.beams <= shape.cache
        return fits and all(_known_beforehand(request) for request in requests)


def _known_beforehand(request: Request) -> bool:
    """Whether it has a step after the one in flight, and the host's part of it does not depend on that one."""
    search = request.search
    return not request.processors.looks_back and search.depth + 2 < search.options.max_length
