"""An engine that echoes, on its own thread, and that a test can hold still; and a server around it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from beamline.protos import beamline_pb2_grpc
from beamline.serving.backends.fake import fake_manifest
from beamline.serving.config import ServeConfig, TextLimits
from beamline.serving.contract.manifest import DecodingDefaults, Limits, Manifest
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.outputs import FinishReason, Hypothesis, Result, Scores, Timings
from beamline.serving.engine.request import Request, RequestOutput, deliver
from beamline.serving.errors import Cancelled, Overloaded, ShuttingDown
from beamline.serving.models.loader import EngineMakers, Observe
from beamline.serving.models.settings import ModelSettings
from beamline.serving.server import Server
from beamline.serving.text.token_bytes import ByteTokenizer

WAIT_SECONDS = 120  # only ever used up by a failure


def small_manifest(**changes: object) -> Manifest:
    """The fake model with limits that are easy to reach."""
    return fake_manifest().model_copy(
        update={
            "limits": Limits(max_source_length=64, max_target_length=80, max_beam_size=8),
            "defaults": DecodingDefaults.model_validate({"beam_size": 4, "max_length": 72}),
            **changes,
        }
    )


def echo(request: Request) -> Result | Exception:
    """Every hypothesis is the source; they differ in their scores."""
    hypotheses = tuple(
        Hypothesis(
            tokens=request.source,
            token_log_probs=(-0.5,) * len(request.source),
            score=-1.0 - rank,
            finish_reason=FinishReason.EOS,
            alignment=(
                tuple((1.0,) + (0.0,) * (len(request.source) - 1) for _ in request.source)
                if request.options is not None and request.options.return_alignment
                else None
            ),
        )
        for rank in range(1 if request.options is None else request.options.num_hypotheses)
    )
    return Result(hypotheses, Timings(queue=0.001, encode=0.002, decode=0.003))


class EngineDouble:
    def __init__(
        self,
        manifest: Manifest | None = None,
        *,
        answer: Callable[[Request], Result | Exception] = echo,
        held: bool = False,
        capacity: int = 1000,
    ) -> None:
        self.manifest = manifest or small_manifest()
        self.plan = Plan.of(self.manifest, 4)
        self.reserved_bytes = 0
        self.answer = answer
        self.submitted: list[Request] = []
        self.scored: list[Request] = []
        self.cancelled: list[int] = []
        self.most_waiting = 0
        self.refused = 0
        self.draining = False
        self.retired = False
        self._held = held
        self.capacity = capacity
        self._waiting: dict[int, Request] = {}
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    # -- the engine's interface ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        if request.options is None:
            self.scored.append(request)
            self._outgoing.put((request, Scores(tuple(-0.5 for _ in request.labels))))
            return
        with self._changed:
            if self.draining:
                raise ShuttingDown("draining")
            if len(self._waiting) >= self.capacity:
                self.refused += 1
                self._changed.notify_all()
                raise Overloaded("the queue is full")
            self.submitted.append(request)
            self._waiting[request.id] = request
            self.most_waiting = max(self.most_waiting, len(self._waiting))
            if not self._held:
                self._send(request.id)
            self._changed.notify_all()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            if request_id in self._waiting:
                self._outgoing.put((self._waiting.pop(request_id), Cancelled("cancelled")))
            self._changed.notify_all()

    def stop_hypothesis(self, request_id: int, index: int) -> None: ...

    # -- for the tests ---------------------------------------------------------------------------------------

    def release(self) -> None:
        with self._changed:
            self._held = False
            for request_id in list(self._waiting):
                self._send(request_id)
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def hold(self) -> None:
        self._held = True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what the server does to this engine."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(condition, WAIT_SECONDS)

        assert await asyncio.to_thread(wait), "it did not happen"

    def _send(self, request_id: int) -> None:
        request = self._waiting.pop(request_id)
        self._outgoing.put((request, self.answer(request)))

    # -- the thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def add(self, engine: object) -> None:
        assert engine is self

    def retire(self, engine: object, gone: Callable[[], None]) -> None:
        self.retired = True
        gone()

    def drain(self, timeout: float | None) -> bool:
        with self._changed:
            self.draining = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def trouble(self, patience: float) -> str | None:
        return None

    def stop(self) -> None:
        self._outgoing.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._outgoing.get()) is not None:
            request, outcome = item
            deliver([RequestOutput(request, outcome)])


def makers(engine: EngineDouble) -> EngineMakers:
    def load(folder: Path, manifest: Manifest, settings: ModelSettings, observe: Observe) -> EngineDouble:
        engine.manifest = manifest
        return engine

    return EngineMakers(load=load, fake=lambda observe: engine, thread=lambda: engine)


class EngineDoubles:
    """Every model gets an engine of its own; this is the thread that drives them, too."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.settings: list[ModelSettings] = []
        self.made: list[EngineDouble] = []
        self.driven: list[EngineDouble] = []
        self.gone: list[tuple[str, int]] = []

    @property
    def makers(self) -> EngineMakers:
        return EngineMakers(load=self._load, fake=lambda observe: EngineDouble(), thread=lambda: self)

    def _load(self, folder: Path, manifest: Manifest, settings: ModelSettings, observe: Observe) -> EngineDouble:
        self.loaded.append((manifest.name, manifest.version))
        self.settings.append(settings)
        self.made.append(EngineDouble(manifest))
        return self.made[-1]

    def start(self) -> None:
        pass

    def add(self, engine: EngineDouble) -> None:
        self.driven.append(engine)
        engine.start()

    def retire(self, engine: EngineDouble, gone: Callable[[], None]) -> None:
        assert not engine.waiting, "a call still uses it"
        self.driven.remove(engine)
        self.gone.append((engine.manifest.name, engine.manifest.version))
        engine.stop()
        gone()

    def drain(self, timeout: float | None) -> bool:
        return all(engine.drain(timeout) for engine in self.driven)

    def trouble(self, patience: float) -> str | None:
        return None

    def stop(self) -> None:
        for engine in self.driven:
            engine.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    """For what a server does in its own time: it counts a call when its answer is on the way already."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    engine: EngineDouble, *, text: TextLimits | None = None, drain_seconds: float | None = None, **changes: object
) -> AsyncIterator[Server]:
    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0, text=text or TextLimits(), drain_seconds=drain_seconds)
    async with started(Server(replace(config, **changes), makers(engine))) as server:  # type: ignore[arg-type]
        yield server


@asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(
    server: Server, options: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[beamline_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(
        server.grpc_address, options=[("grpc.max_receive_message_length", -1), *options]
    ) as channel:
        yield beamline_pb2_grpc.InferenceStub(channel)


def ids(text: str) -> tuple[int, ...]:
    return tuple(ByteTokenizer().encode(text))
