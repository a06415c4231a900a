"""The engine of one model: requests join and leave the running batch at every step.

    admit  -> encode newcomers, place them into slots
    decode -> run the step graph on the active slots
    settle -> record candidates, finish, free slots
    report -> one StepStats record

`submit` and `cancel` may be called from any thread; everything else happens on the engine's own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.backends.base import Backend, Start, StepInputs, StepOutputs
from serving.engine.admission import Admission
from serving.engine.job import Job, groups_by_length
from serving.engine.plan import Plan
from serving.engine.request import Hypothesis, Request, Result, Timings
from serving.engine.room import Room
from serving.engine.rules import as_arrays
from serving.engine.scheduler import Reason, Scheduler
from serving.engine.search import StepView
from serving.engine.stats import Finished, Outcome, StepStats
from serving.errors import Cancelled, ComputeError, DeadlinePassed, InvalidRequest, Overloaded, ShuttingDown
from serving.manifest import Manifest

log = logging.getLogger(__name__)

ENCODE_TOKENS = 1024  # source tokens that are encoded between two steps: decoding never waits long


# What a request that will not go on is answered, and counted as.
_DROPPED: dict[Reason, tuple[Callable[[], Exception], Outcome]] = {
    Reason.CANCELLED: (lambda: Cancelled("cancelled by the client"), Outcome.CANCELLED),
    Reason.DEADLINE: (lambda: DeadlinePassed("the deadline is over"), Outcome.DEADLINE),
    Reason.QUEUE_TIMEOUT: (
        lambda: Overloaded("no slot was free within the call's queue timeout; try again later, or allow more"),
        Outcome.QUEUE_TIMEOUT,
    ),
}


@dataclass(slots=True)
class _Counts:
    """What happens in one step."""

    admitted: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    moves: int = 0
    relayouts: int = 0
    compactions: int = 0
    finished: list[Finished] = field(default_factory=list)


class Engine:
    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        plan: Plan,
        *,
        max_queue: int,
        early_refusal: bool = True,
        observe: Callable[[StepStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.plan = plan
        self.reserved_bytes = backend.allocate(plan.slots, plan.largest)
        self.wake: Callable[[], None] = lambda: None  # set by the thread that drives us
        self._backend = backend
        self.observe = observe
        self._clock = clock
        self._scheduler: Scheduler[Job] = Scheduler(plan.slots)
        self._room = Room(backend, plan)
        self._counts = _Counts()
        # What other threads hand over, taken in at the next step.
        self._lock = threading.Lock()
        self._arrived: list[Job] = []
        self._cancelled: list[int] = []
        self._admission = Admission(manifest.name, plan.slots, max_queue, early_refusal)
        self._draining = False

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        now = self._clock()
        job = Job.of(request, self.manifest, now)
        seconds_left = None if job.deadline is None else job.deadline - now
        with self._lock:
            if self._draining:
                raise ShuttingDown("the server is shutting down; try another one")
            self._admission.enter(job.priority, seconds_left, len(self._scheduler.active))
            self._arrived.append(job)
        self.wake()

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._cancelled.append(request_id)
        self.wake()

    def drain(self) -> None:
        """Refuses new work from now on; what is here is finished."""
        with self._lock:
            self._draining = True
        self.wake()

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self._arrived or self._cancelled or self._admission.waiting or self._scheduler.active)

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> StepStats:
        """Everything that happens between two tokens."""
        began = self._clock()
        self._counts = _Counts()
        self._take_in(began)
        self._admit()
        active = len(self._scheduler.active)
        if active:
            self._decode_and_settle()
        return self._report(began, active)

    def fail_everything(self, error: Exception) -> None:
        """Answers everybody who is here with an error. The engine itself can go on."""
        self._take_in(self._clock())
        self._fail_active(error)
        while waiting := self._scheduler.next_in_line():
            self._left_queue(waiting)
            for job in waiting:
                self._resolve(job, error, Outcome.FAILED)

    def _fail_active(self, error: Exception) -> None:
        while self._scheduler.active:
            slot = len(self._scheduler.active) - 1
            self._backend.zero(slot)
            self._finish(slot, error, Outcome.FAILED)

    def _take_in(self, now: float) -> None:
        """New requests, cancellations and deadlines."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        for job in arrived:
            self._scheduler.submit(job)
        for request_id in cancelled:
            self._scheduler.cancel(request_id)
        for dropped in self._scheduler.sweep(now):
            error, outcome = _DROPPED[dropped.reason]
            if dropped.slot is None:
                self._left_queue([dropped.request])
                self._resolve(dropped.request, error(), outcome)
            else:
                self._finish(dropped.slot, error(), outcome)
        for slot in reversed(range(len(self._scheduler.active))):
            job = self._scheduler.active[slot]
            if job.out_of_time(now):
                job.search.stop()
                self._answer(slot)

    def _left_queue(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            for job in jobs:
                self._admission.leave(job.priority)

    # -- admit ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        newcomers = self._newcomers()
        if not newcomers:
            return
        self._left_queue(newcomers)
        began = self._clock()
        groups = groups_by_length(newcomers, ENCODE_TOKENS)
        encoded = [pair for group in groups for pair in self._encode_group(group)]
        now = self._clock()
        self._counts.encode_seconds += now - began
        if not encoded:
            return
        rows = len(self._scheduler.active)
        jobs = [job for job, _ in encoded]
        self._make_room([*self._scheduler.active, *jobs], rows)
        for job, memory in encoded:
            job.started, job.encode_seconds = began, now - began
            slot = self._scheduler.start(job)
            options = job.request.options
            token = self.manifest.vocabulary.start_id
            greedy = options.beam_size == 1
            self._backend.place(slot, memory, Start(token, options.beam_size, independent=greedy))
        self._counts.admitted += len(encoded)

    def _newcomers(self) -> list[Job]:
        """Whom to encode now: as many as there is room for, but while others decode, no more than keeps them waiting
        for a moment."""
        if not self._scheduler.active:
            return self._scheduler.next_in_line()
        tokens = 0

        def fits(job: Job) -> bool:
            nonlocal tokens
            tokens += job.source_length
            return tokens <= ENCODE_TOKENS or tokens == job.source_length

        return self._scheduler.next_in_line(fits)

    def _encode_group(self, group: Sequence[Job]) -> list[tuple[Job, Any]]:
        try:
            memories = self._backend.encode([job.request.source for job in group])
            return list(zip(group, memories, strict=True))
        except Exception:
            log.exception("encoding failed for a group of %d", len(group))
            if len(group) == 1:
                self._resolve(group[0], ComputeError("the encoder failed"), Outcome.FAILED)
                return []
        # One of them is at fault: alone, the others succeed.
        return [pair for job in group for pair in self._encode_group([job])]

    # -- decode --------------------------------------------------------------------------------------------------

    def _make_room(self, jobs: Sequence[Job], rows: int) -> None:
        copies = self._room.fit(jobs, rows)
        self._counts.relayouts += copies.relayouts
        self._counts.compactions += copies.compactions

    def _decode_and_settle(self) -> None:
        jobs = self._scheduler.active
        self._make_room(jobs, len(jobs))
        inputs = self._inputs(jobs)
        began = self._clock()
        try:
            outputs = self._backend.run(inputs)
        except Exception:
            log.exception(
                "a step of %s failed; its %d requests are answered with an error",
                self.manifest.name,
                len(jobs),
            )
            self._fail_active(ComputeError("the step failed"))
            return
        self._counts.decode_seconds += self._clock() - began
        self._settle(outputs)

    def _inputs(self, jobs: Sequence[Job]) -> StepInputs:
        forced = [job.search.forced_token() for job in jobs]
        edits = [
            job.rules.edits(job.search.depth + 1, job.search.sequences() if job.rules.need_sequences else None)
            for job in jobs
        ]
        index, scale, add = as_arrays(edits, self._room.shape.beams)
        return StepInputs(np.array([-1 if token is None else token for token in forced], np.int64), index, scale, add)

    # -- settle --------------------------------------------------------------------------------------------------

    def _settle(self, outputs: StepOutputs) -> None:
        now = self._clock()
        broken = np.isnan(outputs.candidate_scores.sum(axis=1)).tolist()
        views = self._views(outputs)
        # From the last slot down, so that a slot that moves into a freed one has been settled already.
        for slot in reversed(range(len(views))):
            job = self._scheduler.active[slot]
            job.first_token = job.first_token or now
            if broken[slot]:
                log.error("request %d of %s: the model's scores are not numbers", job.id, self.manifest.name)
                self._backend.zero(slot)
                self._finish(slot, ComputeError("the model's scores are not numbers"), Outcome.FAILED)
                continue
            job.search.advance(views[slot])
            if job.search.done:
                self._answer(slot)

    def _views(self, outputs: StepOutputs) -> list[StepView]:
        """Each request's own part, without the beams that only pad it to the batch's width."""
        tokens, parents, scores = outputs.tokens.tolist(), outputs.parents.tolist(), outputs.scores.tolist()
        candidate_scores = outputs.candidate_scores.tolist()
        candidate_tokens = outputs.candidate_tokens.tolist()
        candidate_parents = outputs.candidate_parents.tolist()
        views = []
        for row, job in enumerate(self._scheduler.active):
            width = job.search.width
            views.append(
                StepView(
                    tokens[row][:width],
                    parents[row][:width],
                    scores[row][:width],
                    candidate_scores[row],
                    candidate_tokens[row],
                    candidate_parents[row],
                )
            )
        return views

    def _answer(self, slot: int) -> None:
        job = self._scheduler.active[slot]
        hypotheses = job.search.hypotheses()
        if not hypotheses:
            error = InvalidRequest("the options forbid every possible output; allow more words or a longer output")
            return self._finish(slot, error, Outcome.FAILED)
        try:
            if job.request.options.return_alignment:
                hypotheses = tuple(self._aligned(job, hypothesis) for hypothesis in hypotheses)
        except Exception:
            log.exception("aligning request %d failed", job.id)
            return self._finish(slot, ComputeError("the alignment failed"), Outcome.FAILED)
        timings = Timings(
            queue=job.started - job.submitted,
            encode=job.encode_seconds,
            decode=self._clock() - job.started - job.encode_seconds,
        )
        with self._lock:
            self._admission.served(timings.encode + timings.decode)
        self._finish(slot, Result(hypotheses, timings), Outcome.OK)

    def _aligned(self, job: Job, hypothesis: Hypothesis) -> Hypothesis:
        prefix = job.request.options.prefix
        start = self.manifest.vocabulary.start_id
        scored = self._backend.score(job.request.source, (*prefix, *hypothesis.tokens), start)
        rows = tuple(tuple(row) for row in scored.attention[len(prefix) :].tolist())
        return Hypothesis(
            hypothesis.tokens,
            hypothesis.token_log_probs,
            hypothesis.score,
            hypothesis.finish_reason,
            alignment=rows,
        )

    def _finish(self, slot: int, answer: Result | Exception, outcome: Outcome) -> None:
        """Frees the slot and answers whoever had it."""
        job = self._scheduler.active[slot]
        moved = self._scheduler.release(slot)
        if moved is not None:
            self._backend.move(moved, slot)
            self._counts.moves += 1
        self._resolve(job, answer, outcome)

    def _resolve(self, job: Job, answer: Result | Exception, outcome: Outcome) -> None:
        self._counts.finished.append(job.record(answer, outcome, self._clock()))
        try:
            job.request.resolve(answer)
        except Exception:
            log.exception("nobody took the answer to request %d", job.id)

    # -- report --------------------------------------------------------------------------------------------------

    def _report(self, began: float, active: int) -> StepStats:
        counts, shape = self._counts, self._room.shape
        stats = StepStats(
            slots=self.plan.slots,
            active=active,
            remaining=len(self._scheduler.active),
            queued=self._scheduler.waiting,
            beam_width=shape.beams if active else 0,
            cache_length=shape.cache if active else 0,
            source_length=shape.source if active else 0,
            live_entries=sum(job.search.used_entries for job in self._scheduler.active),
            admitted=counts.admitted,
            encode_seconds=counts.encode_seconds,
            decode_seconds=counts.decode_seconds,
            step_seconds=self._clock() - began,
            moves=counts.moves,
            relayouts=counts.relayouts,
            compactions=counts.compactions,
            finished=tuple(counts.finished),
        )
        self.observe(stats)
        return stats
