"""A worker process: takes commands from the parent through a pipe, sends requests, and records their times."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import numpy as np

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load import histogram
from beamline.loadtest.load.event_loop import LoopLag, precise_loop
from beamline.loadtest.load.records import Recorder
from beamline.loadtest.load.worker_messages import (
    Check,
    Checked,
    ClosedStage,
    Command,
    Connected,
    OpenStage,
    Progress,
    Quit,
    Refused,
    StageDone,
    Stop,
    WorkerHealth,
    WorkerSetup,
)
from beamline.loadtest.targets.protocols import TARGETS
from beamline.loadtest.targets.status import DEADLINE_EXCEEDED, OK, STATUS_NAMES, UNFINISHED
from beamline.loadtest.targets.target import Connection, Reply, Request, Target

_PROGRESS_SECONDS = 0.25
_STOP_GRACE_SECONDS = 1.0
_DEADLINE_GRACE_SECONDS = 5.0  # a call that outlives its deadline by this much will never end
_BUSY = "RESOURCE_EXHAUSTED"


def main(pipe: Pipe, setup: WorkerSetup) -> None:
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # a full collection in the middle of a run is a pause that we would measure
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_run_commands(pipe, setup, TARGETS[setup.connection.protocol]))


async def _run_commands(pipe: Pipe, setup: WorkerSetup, make_target: Callable[[Connection], Target]) -> None:
    commands: asyncio.Queue[Command] = asyncio.Queue()
    stage: _Stage | None = None

    def receive() -> None:
        try:
            command: Command = pipe.recv()
        except EOFError:  # the parent is gone
            command = Quit()
        if isinstance(command, Stop | Quit) and stage is not None:
            stage.stop()
        if isinstance(command, Quit):
            loop.remove_reader(pipe.fileno())
        commands.put_nowait(command)

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
        while not isinstance(command := await commands.get(), Quit):
            if isinstance(command, Check):
                await _check(target, setup.workload.kinds())
                pipe.send(Checked())
            elif isinstance(command, OpenStage | ClosedStage):
                stage = _Stage(pipe, setup, target, command)
                pipe.send(await stage.run())
                stage = None
    except LoadTestError as error:
        pipe.send(Refused(str(error)))
    except BrokenPipeError:
        pass  # the parent is gone
    finally:
        await target.close()


async def _check(target: Target, kinds: list[Request]) -> None:
    """Fails for a server that refuses a kind of request. One that is only busy passes: that is to be measured."""
    for request in kinds:
        reply = await target.send(request)
        status = STATUS_NAMES[reply.status]
        if reply.status != OK and status != _BUSY:
            model = f" for model {request.model!r}" if request.model else ""
            options = (
                f" with {', '.join(f'{name}={value}' for name, value in request.options)}" if request.options else ""
            )
            raise LoadTestError(f"the server refuses the first request{model}{options}: {reply.detail} ({status})")


class _Stage:
    """One stage of load, open or closed loop."""

    def __init__(self, pipe: Pipe, setup: WorkerSetup, target: Target, command: OpenStage | ClosedStage) -> None:
        self._pipe = pipe
        self._setup = setup
        self._target = target
        self._command = command
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
        command = self._command
        await asyncio.sleep(max(command.start - time.monotonic(), 0))
        lag = LoopLag()
        helpers = [asyncio.create_task(lag.watch()), asyncio.create_task(self._report_progress())]
        cpu, wall = time.process_time(), time.monotonic()
        sending = asyncio.create_task(self._open(command) if isinstance(command, OpenStage) else self._closed(command))
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
        health = WorkerHealth(time.process_time() - cpu, time.monotonic() - wall, np.array(lag.lags))
        if sending.done():
            sending.result()  # raises: a defect of ours must not look like a short run
        sending.cancel()
        await self._collect(stopped)
        for helper in (*helpers, stopped):
            helper.cancel()
        self._pipe.send(self._progress())
        return StageDone(self._recorder.records(), health)

    async def _open(self, command: OpenStage) -> None:
        """Sends at the intended times, whatever is answered."""
        number, workers = self._setup.worker, self._setup.workers
        for intended in command.times.tolist():
            delay = command.start + intended - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            elif self._sent % 16 == 0:
                await asyncio.sleep(0)  # late, but answers must be read on time
            self._begin(number, intended)
            number += workers

    async def _closed(self, command: ClosedStage) -> None:
        """Every client sends, waits for its answer, and sends again."""
        numbers = iter(range(self._setup.worker, 1 << 62, self._setup.workers))
        ends = command.start + command.duration

        async def client() -> None:
            while (now := time.monotonic()) < ends and not self._stopped.is_set():
                # Shielded: after a stop, a request in flight may still be answered.
                await asyncio.shield(self._begin(next(numbers), now - command.start))
                if command.loop.think:
                    await asyncio.sleep(command.loop.think)

        await asyncio.gather(*(client() for _ in range(command.loop.clients)))

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
        request = self._setup.workload.request(number)
        start = self._command.start
        sent = time.monotonic() - start
        try:
            reply = await self._target.send(request)
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
            model=request.model,
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

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._pipe.send(self._progress())

    def _progress(self) -> Progress:
        progress = Progress(self._setup.worker, self._sent, self._in_flight, self._statuses, self._latencies)
        self._sent, self._statuses, self._latencies = 0, Counter(), Counter()
        return progress
