"""One process that sends. It takes orders from the parent through a pipe, and keeps the times."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import numpy as np

from beamline.loadtest import histogram
from beamline.loadtest.client import BeamlineTarget, Connection, Target
from beamline.loadtest.clock import LoopLag, precise_loop
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.messages import (
    Check,
    Checked,
    ClosedStage,
    Connected,
    OpenStage,
    Order,
    Progress,
    Quit,
    Refused,
    StageDone,
    Stop,
    WorkerHealth,
    WorkerSetup,
)
from beamline.loadtest.open_inference import OpenInferenceTarget
from beamline.loadtest.record import DEADLINE_EXCEEDED, OK, STATUS_NAMES, UNFINISHED, Recorder
from beamline.loadtest.reply import Reply
from beamline.loadtest.workload import Item

_PROGRESS_SECONDS = 0.25
_STOP_GRACE_SECONDS = 1.0
_DEADLINE_GRACE_SECONDS = 5.0  # a call that outlives its deadline by this much will never end
_BUSY = "RESOURCE_EXHAUSTED"
_TARGETS: dict[str, Callable[[Connection], Target]] = {
    "beamline.v1": BeamlineTarget,
    "open-inference": OpenInferenceTarget,
}


def main(pipe: Pipe, setup: WorkerSetup) -> None:
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # a full collection in the middle of a run is a pause that we would measure
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_obey(pipe, setup, _TARGETS[setup.connection.protocol]))


async def _obey(pipe: Pipe, setup: WorkerSetup, make_target: Callable[[Connection], Target]) -> None:
    orders: asyncio.Queue[Order] = asyncio.Queue()
    stage: _Stage | None = None

    def receive() -> None:
        try:
            order: Order = pipe.recv()
        except EOFError:  # the parent is gone
            order = Quit()
        if isinstance(order, Stop | Quit) and stage is not None:
            stage.stop()
        if isinstance(order, Quit):
            loop.remove_reader(pipe.fileno())
        orders.put_nowait(order)

    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), receive)
    try:
        target = make_target(setup.connection)
    except LoadTestError as error:
        pipe.send(Refused(str(error)))
        return
    try:
        await target.connect()
        pipe.send(Connected())
        while not isinstance(order := await orders.get(), Quit):
            if isinstance(order, Check):
                await _check(target, setup.workload.kinds())
                pipe.send(Checked())
            elif isinstance(order, OpenStage | ClosedStage):
                stage = _Stage(pipe, setup, target, order)
                pipe.send(await stage.run())
                stage = None
    except LoadTestError as error:
        pipe.send(Refused(str(error)))
    except BrokenPipeError:
        pass  # nobody is left to tell
    finally:
        await target.close()


async def _check(target: Target, kinds: list[Item]) -> None:
    """A server that is only busy passes: that is what shall be measured."""
    for item in kinds:
        reply = await target.send(item)
        status = STATUS_NAMES[reply.status]
        if reply.status != OK and status != _BUSY:
            model = f" for model {item.model!r}" if item.model else ""
            options = f" with {', '.join(f'{name}={value}' for name, value in item.options)}" if item.options else ""
            raise LoadTestError(f"the server refuses the first request{model}{options}: {reply.detail} ({status})")


class _Stage:
    """One stretch of load."""

    def __init__(self, pipe: Pipe, setup: WorkerSetup, target: Target, order: OpenStage | ClosedStage) -> None:
        self._pipe = pipe
        self._setup = setup
        self._target = target
        self._order = order
        self._recorder = Recorder(setup.models)
        self._stopped = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._nothing_runs = asyncio.Event()
        # Since the last progress report.
        self._sent = 0
        self._in_flight = 0
        self._statuses: Counter[int] = Counter()
        self._latencies: Counter[int] = Counter()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> StageDone:
        order = self._order
        await asyncio.sleep(max(order.start - time.monotonic(), 0))
        lag = LoopLag()
        helpers = [asyncio.create_task(lag.watch()), asyncio.create_task(self._tell_progress())]
        cpu, wall = time.process_time(), time.monotonic()
        sending = asyncio.create_task(self._open(order) if isinstance(order, OpenStage) else self._closed(order))
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
        health = WorkerHealth(time.process_time() - cpu, time.monotonic() - wall, np.array(lag.lags))
        if sending.done():
            sending.result()  # a mistake of ours must not pass for a short run
        sending.cancel()
        await self._collect(stopped)
        for helper in (*helpers, stopped):
            helper.cancel()
        self._pipe.send(self._progress())
        return StageDone(self._recorder.records(), health)

    async def _open(self, order: OpenStage) -> None:
        """Sends on time, whatever comes back."""
        number, workers = self._setup.worker, self._setup.workers
        for intended in order.times.tolist():
            delay = order.start + intended - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            elif self._sent % 16 == 0:
                await asyncio.sleep(0)  # late, but answers must be taken in on time
            self._begin(number, intended)
            number += workers

    async def _closed(self, order: ClosedStage) -> None:
        """Every client asks, waits, and asks again."""
        numbers = iter(range(self._setup.worker, 1 << 62, self._setup.workers))
        ends = order.start + order.duration

        async def client() -> None:
            while (now := time.monotonic()) < ends and not self._stopped.is_set():
                # Shielded: after a stop, a question that was asked may still be answered.
                await asyncio.shield(self._begin(next(numbers), now - order.start))
                if order.loop.think:
                    await asyncio.sleep(order.loop.think)

        await asyncio.gather(*(client() for _ in range(order.loop.clients)))

    def _begin(self, number: int, intended: float) -> asyncio.Task[None]:
        self._sent += 1
        self._in_flight += 1
        task = asyncio.get_running_loop().create_task(self._one(number, intended))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._nothing_runs.set()

    async def _one(self, number: int, intended: float) -> None:
        item = self._setup.workload.item(number)
        start = self._order.start
        sent = time.monotonic() - start
        try:
            reply = await self._target.send(item)
        except asyncio.CancelledError:
            if self._stopped.is_set():
                reply = Reply(UNFINISHED, "no answer yet when the run was stopped")
            else:
                reply = Reply(DEADLINE_EXCEEDED, "no answer, not even at the deadline")
        finished = time.monotonic() - start
        self._in_flight -= 1
        self._statuses[reply.status] += 1
        if reply.status in (OK, DEADLINE_EXCEEDED):
            self._latencies[histogram.bucket(finished - intended)] += 1
        self._recorder.add(
            number=number,
            model=item.model,
            status=reply.status,
            intended=intended,
            sent=sent,
            finished=finished,
            token_times=[moment - start for moment in reply.token_times],
            source_tokens=reply.source_tokens,
            target_tokens=reply.target_tokens,
            server_queue=reply.server_queue,
            detail=reply.detail,
        )

    async def _collect(self, stopped: asyncio.Task[bool]) -> None:
        """Waits for what is in flight: each call for its own deadline, but not long after a stop."""
        if self._running:
            self._nothing_runs.clear()
            answered = asyncio.create_task(self._nothing_runs.wait())
            patience = self._setup.connection.deadline + _DEADLINE_GRACE_SECONDS
            await asyncio.wait([answered, stopped], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_STOP_GRACE_SECONDS)
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running)

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._pipe.send(self._progress())

    def _progress(self) -> Progress:
        progress = Progress(self._setup.worker, self._sent, self._in_flight, self._statuses, self._latencies)
        self._sent, self._statuses, self._latencies = 0, Counter(), Counter()
        return progress
