"""A server with an echoing language model whose steps a test lets happen, one by one or freely."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.config import ServeConfig, TextLimits
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.request import Request
from beamline.serving.engine.thread import EngineThread
from beamline.serving.models.loader import EngineMakers, Observe
from beamline.serving.server import Server
from tests.serving.doubles import WAIT_SECONDS, started

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class GatedEngine:
    """The real engine over the fake device. While the gate is closed, every step waits for a permit."""

    def __init__(self, task: Literal["translate", "generate"] = "generate", slots: int = 2, gate: bool = False) -> None:
        self.manifest = fake_manifest("echo", task).model_copy(update={"chat_template": TEMPLATE})
        self.slots = slots
        self.stats: list[StepStats] = []
        self.submitted: list[int] = []
        self.cancelled: list[int] = []
        self._changed = threading.Condition()
        self._permits = 0
        self._open = not gate

    def makers(self) -> EngineMakers:
        return EngineMakers(
            load=lambda folder, manifest, settings, observe: self._make(observe), fake=self._make, thread=EngineThread
        )

    def _make(self, observe: Observe) -> Engine:
        backend = FakeBackend(self.manifest, step_seconds=1.0, sleep=self._wait)

        def report(stats: StepStats) -> None:
            observe(stats)
            with self._changed:
                self.stats.append(stats)
                self._changed.notify_all()

        engine = Engine(
            self.manifest,
            backend,
            Plan.of(self.manifest, self.slots),
            max_queue=100,
            prefix_cache_bytes=1 << 20,
            observe=report,
        )
        submit, cancel = engine.submit, engine.cancel

        def submit_and_tell(request: Request) -> None:
            submit(request)
            with self._changed:
                self.submitted.append(request.id)
                self._changed.notify_all()

        def cancel_and_tell(request_id: int) -> None:
            cancel(request_id)
            with self._changed:
                self.cancelled.append(request_id)
                self._changed.notify_all()

        engine.submit = submit_and_tell  # type: ignore[method-assign]
        engine.cancel = cancel_and_tell  # type: ignore[method-assign]
        return engine

    def _wait(self, seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._open or self._permits > 0, WAIT_SECONDS)
            self._permits -= 0 if self._open else 1

    def permit(self, steps: int) -> None:
        with self._changed:
            self._permits += steps
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    async def until(self, condition: Callable[[list[StepStats]], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: condition(self.stats), WAIT_SECONDS)

        assert await asyncio.to_thread(wait), "it did not happen"

    @property
    def decoded_steps(self) -> int:
        return sum(stats.active > 0 for stats in self.stats)


@asynccontextmanager
async def serving(engine: GatedEngine, max_unread_tokens: int = 4096) -> AsyncIterator[Server]:
    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0, text=TextLimits(max_unread_tokens=max_unread_tokens))
    async with started(Server(config, engine.makers())) as server:
        try:
            yield server
        finally:
            engine.open()  # whatever happened, nobody waits for a permit any more
