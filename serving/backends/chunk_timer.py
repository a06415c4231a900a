"""How long a GPU takes for chunks of prompts, by its own clock: the host goes on as soon as it has asked for one.

Nothing waits for that. The times are read when a step has been waited for that was asked for later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from beamline.serving.backends.device import Gpu
from beamline.serving.contract.backend import ChunkTime

_MOST = 8  # that are measured between two steps: where nobody decodes there may be any number


class _Chunk(NamedTuple):
    number: int
    tokens: int
    begin: Any
    end: Any


class ChunkTimer:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.asked = 0  # chunks
        self._pending: deque[_Chunk] = deque()
        self._times: deque[ChunkTime] = deque(maxlen=_MOST)

    @contextmanager
    def measure(self, tokens: int) -> Iterator[None]:
        """What is asked for inside it is a chunk."""
        begin = self._gpu.mark(timed=True)
        try:
            yield
            end = self._gpu.mark(timed=True)
        except BaseException:
            self._gpu.forget(begin)
            raise
        self.asked += 1
        self._pending.append(_Chunk(self.asked, tokens, begin, end))
        if len(self._pending) > _MOST:
            _forget(self._gpu, self._pending.popleft())

    def reached(self, asked: int) -> None:
        """The device is done with the first so many of them, and has said so."""
        while self._pending and self._pending[0].number <= asked:
            chunk = self._pending.popleft()
            try:
                self._times.append(ChunkTime(chunk.tokens, self._gpu.seconds(chunk.begin, chunk.end)))
            finally:
                _forget(self._gpu, chunk)

    def take(self) -> tuple[ChunkTime, ...]:
        """What has become known since this was asked."""
        found = tuple(self._times)
        self._times.clear()
        return found


def _forget(gpu: Gpu, chunk: _Chunk) -> None:
    gpu.forget(chunk.begin)
    gpu.forget(chunk.end)
