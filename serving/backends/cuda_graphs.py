"""What is asked of a stream, recorded as CUDA graphs that can be repeated."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from beamline.serving.backends.capture_gate import COLLECTOR, gate_of
from beamline.serving.backends.cuda_resources import Owned, checked
from beamline.serving.errors import ComputeError, OutOfMemory

log = logging.getLogger(__name__)

Enter = Callable[[], None]  # makes the device the calling thread's own


class GraphRecorder:
    def __init__(self, driver: Any, number: int, stream: Any, owned: Owned) -> None:
        """`number` is the GPU's."""
        self.active = False  # something is recorded just now
        self._cuda, self._number, self._stream, self._owned = driver, number, stream, owned

    def record(self, work: Callable[[], None], enter: Enter) -> Callable[[], None] | None:
        """As `Gpu.record`."""
        # The collector may not end a model of this GPU, either, before the gate knows that the recording is over.
        with COLLECTOR.paused(), gate_of(self._number).recording() as free:
            if free:
                return self._record(work, enter)
        _say_not_recorded("a model is being loaded on the same GPU")
        return None

    def _record(self, work: Callable[[], None], enter: Enter) -> Callable[[], None] | None:
        enter()
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        (error,) = self._cuda.cuStreamBeginCapture(self._stream, mode)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            _say_not_recorded(error.name)
            return None
        self.active = True
        try:
            work()
        except Exception as reason:
            _, graph = self._end_capture(enter)  # whatever was captured
            if graph is not None and int(graph):
                self._cuda.cuGraphDestroy(graph)
            _say_not_recorded(reason)
            return None
        error, graph = self._end_capture(enter)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            _say_not_recorded(error.name)
            return None
        error, executable = self._cuda.cuGraphInstantiate(graph, 0)
        checked(self._cuda, self._number, self._cuda.cuGraphDestroy(graph))
        if error != self._cuda.CUresult.CUDA_SUCCESS:  # it takes memory of the device, which may have none left
            _say_not_recorded(error.name)
            return None
        return self._replay_of(executable, enter)

    def _end_capture(self, enter: Enter) -> tuple[Any, Any]:
        """The stream must leave capture, also where the device is lost: until then, nobody may wait for the device."""
        self.active = False
        with suppress(ComputeError):
            enter()
        error, graph = self._cuda.cuStreamEndCapture(self._stream)
        return error, graph

    def _replay_of(self, executable: Any, enter: Enter) -> Callable[[], None]:
        def replay() -> None:
            enter()
            (error,) = self._cuda.cuGraphLaunch(executable, self._stream)
            if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:  # cuBLAS may have recorded that it takes some
                raise OutOfMemory(f"GPU {self._number} has too little memory left to repeat a recorded step")
            checked(self._cuda, self._number, (error,))

        self._owned.graphs.add(int(executable))
        freed = weakref.finalize(replay, self._owned.end_graph, executable)
        freed.atexit = False
        return replay


def _say_not_recorded(reason: object) -> None:
    """Then it runs without: nobody's step fails for that."""
    log.info("a step is not recorded as a CUDA graph: %s", reason)
