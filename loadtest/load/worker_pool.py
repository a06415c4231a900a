"""The worker processes, as the parent drives them: started once, then stage after stage."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import cast

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load import worker
from beamline.loadtest.load.arrivals import Arrivals, ClosedLoop
from beamline.loadtest.load.records import Records, merged
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
    Result,
    StageDone,
    Stop,
    WorkerHealth,
    WorkerSetup,
)
from beamline.loadtest.load.workload import Workload
from beamline.loadtest.targets.status import OK, STATUS_NAMES
from beamline.loadtest.targets.target import Connection

_START_DELAY = 0.2  # seconds; until then every worker has its command
_QUIT_SECONDS = 5.0
_SPAWN_SECONDS = 60.0
_FEWEST_FAILURES = 3  # fewer may be bad luck of a slow run
INTERRUPTED = "interrupted"

Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class StageOutcome:
    records: Records
    health: tuple[WorkerHealth, ...]
    start: float  # by time.monotonic
    sending_ended: float  # in seconds from the start
    stopped: str | None = None  # why it ended before its time
    lost: bool = False  # because the server gave no good answer any more


class WorkerPool:
    def __init__(self, pipes: Sequence[Pipe], processes: Sequence[SpawnProcess], patience: float) -> None:
        self._pipes = list(pipes)
        self._processes = list(processes)
        self._patience = patience  # seconds without a single good answer, after which a run is given up

    def run(self, arrivals: Arrivals, duration: float, seed: int, watch: Watch) -> StageOutcome:
        """One stage. Ends early, with what there is, when interrupted and when the server is lost."""
        start = time.monotonic() + _START_DELAY
        for pipe, command in zip(self._pipes, self._commands(arrivals, start, duration, seed), strict=True):
            pipe.send(command)
        lost = _LostServer(self._patience)
        done: list[StageDone] = []
        waiting = set(self._pipes)
        stopped: str | None = None
        gone = False
        while waiting:
            try:
                for pipe in cast("list[Pipe]", wait(list(waiting), timeout=1.0)):
                    report = self._receive(pipe)
                    if isinstance(report, Progress):
                        watch(report)
                        lost.see(report)
                    elif isinstance(report, StageDone):
                        done.append(report)
                        waiting.discard(pipe)
                    else:  # it died
                        stopped = stopped or "a worker process of the load tester ended"
                        waiting.discard(pipe)
                        self._stop(waiting)
            except KeyboardInterrupt:
                if stopped == INTERRUPTED:
                    raise
                stopped = INTERRUPTED
                self._stop(waiting)
            if stopped is None and (reason := lost.reason()) is not None:
                stopped, gone = reason, True
                self._stop(waiting)
        health = tuple(each.health for each in done)
        ended = max((each.wall_seconds for each in health), default=0.0)
        return StageOutcome(merged([each.records for each in done]), health, start, ended, stopped, gone)

    def _commands(self, arrivals: Arrivals, start: float, duration: float, seed: int) -> Iterator[Command]:
        workers = len(self._pipes)
        if isinstance(arrivals, ClosedLoop):
            for index in range(workers):
                clients = len(range(index, arrivals.clients, workers))
                yield ClosedStage(start, replace(arrivals, clients=clients), duration)
        else:
            times = arrivals.times(duration, seed)
            for index in range(workers):
                yield OpenStage(start, times[index::workers], duration)

    def _stop(self, pipes: set[Pipe]) -> None:
        for pipe in pipes:
            _send(pipe, Stop())

    def _receive(self, pipe: Pipe) -> Result | None:
        try:
            report: Result = pipe.recv()
        except (EOFError, ConnectionError):
            return None
        return report

    def expect(self, pipes: Sequence[Pipe], kind: type[Connected] | type[Checked], seconds: float) -> None:
        """Waits until each of them has answered so; raises the reason if one does not."""
        ends = time.monotonic() + seconds
        for pipe in pipes:
            if not pipe.poll(max(ends - time.monotonic(), 0)):
                raise LoadTestError(f"a worker process of the load tester did not answer for {seconds:g} s")
            report = self._receive(pipe)
            if isinstance(report, Refused):
                raise LoadTestError(report.reason)
            if not isinstance(report, kind):
                raise LoadTestError("a worker process of the load tester ended at its start")

    def check(self, seconds: float) -> None:
        """The first worker sends one request of each kind, so that a wrong request is reported before the run."""
        self._pipes[0].send(Check())
        self.expect(self._pipes[:1], Checked, seconds)

    def close(self) -> None:
        for pipe in self._pipes:
            _send(pipe, Quit())
        for process in self._processes:
            process.join(_QUIT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def start_workers(
    connection: Connection, workload: Workload, models: tuple[str, ...], workers: int, patience: float
) -> Iterator[WorkerPool]:
    """Worker processes that are connected, and whose requests the server accepts."""
    # Not forked: gRPC's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(workers):
        ours, theirs = context.Pipe()
        setup = WorkerSetup(connection, workload, models, index, workers)
        process = context.Process(target=worker.main, args=(theirs, setup), name=f"loadtest-{index}", daemon=True)
        with _ignoring_interrupts():
            process.start()
        theirs.close()  # or we would never see that the worker has ended
        pipes.append(ours)
        processes.append(process)
    pool = WorkerPool(pipes, processes, patience)
    try:
        pool.expect(pipes, Connected, connection.connect_timeout + _SPAWN_SECONDS)
        pool.check((connection.deadline + 1) * len(workload.kinds()) + _SPAWN_SECONDS)
        yield pool
    finally:
        pool.close()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A process that is started now ignores Ctrl-C from the beginning: the parent handles it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _LostServer:
    """Notices that the server is gone: failures, and not one good answer for some time."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._failures: Counter[int] = Counter()
        self._first_failure = 0.0

    def see(self, progress: Progress) -> None:
        if progress.statuses[OK]:
            self._failures.clear()
        elif progress.statuses:
            if not self._failures:
                self._first_failure = time.monotonic()
            self._failures.update(progress.statuses)

    def reason(self) -> str | None:
        if self._failures.total() < _FEWEST_FAILURES or time.monotonic() - self._first_failure < self._patience:
            return None
        names = ", ".join(STATUS_NAMES[status] for status, _ in self._failures.most_common())
        return f"the server gave no good answer for {self._patience:g} s ({names})"


def _send(pipe: Pipe, command: Command) -> None:
    with suppress(OSError):  # it has ended already, which is noticed where it is waited for
        pipe.send(command)
