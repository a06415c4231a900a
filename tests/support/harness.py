"""An engine that a test steps by hand, and everything that it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.contract.call import DEFAULT_PRIORITY
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece, Result, TraceStep
from beamline.serving.engine.request import Request
from tests.support.emulated_device import EmulatedDevice
from tests.support.engines import Answer, make_engine, step


class Converted(Protocol):
    @property
    def folder(self) -> Path: ...

    @property
    def manifest(self) -> Manifest: ...


class Harness:
    def __init__(self, model: Converted, slots: int = 8, max_queue: int = 1000, prefix_cache: int = 0) -> None:
        self.now = 0.0
        self.stats: list[StepStats] = []
        self.answers: dict[int, Answer] = {}
        self.pieces: dict[int, list[Piece]] = {}
        self.steps: dict[int, list[TraceStep]] = {}  # of those who are traced
        self.engine = make_engine(
            model.folder,
            model.manifest,
            slots,
            max_queue=max_queue,
            prefix_cache_bytes=prefix_cache,
            observe=self.stats.append,
            clock=lambda: self.now,
        )
        self.backend = cast(CpuBackend, self.engine._backend)  # or one with the same methods
        device = self.backend._device
        if isinstance(device, EmulatedDevice):
            device.clock = lambda: self.now

    def submit(
        self,
        source: Sequence[int],
        options: DecodingOptions,
        deadline: float | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> int:
        request = Request(
            tuple(source), options, lambda output: self._take(request.id, output), deadline, priority, streams=True
        )
        self.pieces[request.id], self.steps[request.id] = [], []
        self.engine.submit(request)
        return request.id

    def _take(self, number: int, output: Output) -> None:
        assert number not in self.answers, "answered twice"
        if isinstance(output, Piece):
            self.pieces[number].append(output)
        elif isinstance(output, TraceStep):
            self.steps[number].append(output)
        else:
            self.answers[number] = output

    def step(self) -> None:
        step(self.engine)

    def finish(self) -> None:
        while self.engine.busy:
            self.step()

    def result(self, number: int) -> Result:
        answer = self.answers[number]
        assert isinstance(answer, Result), answer
        return answer

    def answer(self, source: Sequence[int], options: DecodingOptions) -> Result:
        number = self.submit(source, options)
        self.finish()
        return self.result(number)
