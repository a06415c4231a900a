"""The engine of one model: requests join and leave the running batch at every step.

    admit  -> encode newcomers, or take in some of their prompts; place who is ready into slots
    decode -> run the step graph on the active slots
    settle -> record candidates, pass on what is certain, finish, free slots
    report -> one StepStats record

`submit`, `score`, `enough` and `cancel` may be called from any thread; everything else happens on the engine's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from beamline.serving.contract.backend import Backend, StepOutputs
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.stats import Finished, Outcome, StepStats
from beamline.serving.engine.admission import Admission
from beamline.serving.engine.callbacks import weakly
from beamline.serving.engine.capacity import Room
from beamline.serving.engine.chunked_prefill import Pace, PromptIntake
from beamline.serving.engine.dropped import DROPPED
from beamline.serving.engine.pipeline import Flights
from beamline.serving.engine.placement import Joining
from beamline.serving.engine.plan import Plan
from beamline.serving.engine.prefill import EncoderIntake, Intake
from beamline.serving.engine.prefix_cache import PrefixCache
from beamline.serving.engine.queue import Inbox
from beamline.serving.engine.request import Hypothesis, Request, Result, Timings
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.engine.scoring import Scoring, ScoringRequest
from beamline.serving.engine.sequence import Job
from beamline.serving.engine.step_arrays import step_inputs, step_views
from beamline.serving.errors import ComputeError, InvalidRequest

log = logging.getLogger(__name__)


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
        prefix_cache_bytes: int = 0,
        prompt_slowdown: float = 2.0,
        run_ahead: bool = True,
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
        self._joining = Joining(backend)
        self._flights = Flights(backend, run_ahead)
        self._inbox: Inbox[Job] = Inbox(Admission(manifest.name, plan.slots, max_queue, early_refusal))
        self._intake: Intake
        could_not_prepare = weakly(self._could_not_prepare)
        if manifest.graphs.prefill is None:
            self._intake = EncoderIntake(backend, self._inbox.left, could_not_prepare)
        else:
            cache = PrefixCache(prefix_cache_bytes)
            pace = Pace(prompt_slowdown)
            self._intake = PromptIntake(backend, self._inbox.left, could_not_prepare, clock, cache, pace)
        scoring = Admission(f"{manifest.name} (scoring)", 1, max_queue, early_refusal)
        self._scoring = Scoring(backend, clock, scoring, weakly(self._scored))
        self._counts = _Counts()

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        now = self._clock()
        job = Job.of(request, self.manifest, now)
        if not self.plan.holds(job.most_entries):
            raise InvalidRequest(
                f"the request may need {job.most_entries} cache entries (its prompt once, and what is generated for "
                f"each of its {job.search.width} beams or samples); this server holds {self.plan.most_entries}: "
                "ask for fewer tokens, or fewer beams or samples"
            )
        self._inbox.submit(job, now, len(self._scheduler.active))
        self.wake()

    def score(self, request: ScoringRequest) -> None:
        self._scoring.submit(request)
        self.wake()

    def cancel(self, request_id: int) -> None:
        self._inbox.cancel(request_id)
        self.wake()

    def enough(self, request_id: int, index: int = 0) -> None:
        """The caller has seen enough of one hypothesis: a sample ends where it is; a beam search ends altogether."""
        self._inbox.enough(request_id, index)
        self.wake()

    def drain(self) -> None:
        """Refuses new work from now on; what is here is finished."""
        self._inbox.close()
        self._scoring.close()
        self.wake()

    @property
    def busy(self) -> bool:
        waiting = self._inbox.busy or len(self._scoring)
        return bool(waiting or self._scheduler.preparing or self._scheduler.active)

    @property
    def load(self) -> int:
        """How many requests are here, for whoever has several engines to choose from."""
        queued = self._inbox.waiting + len(self._scoring)
        return queued + self._scheduler.preparing + len(self._scheduler.active)

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
        self._scoring.advance(others_wait=active > 0)
        return self._report(began, active)

    def fail_everything(self, error: Exception) -> None:
        """Answers everybody who is here with an error. The engine itself can go on."""
        self._take_in(self._clock())
        self._fail_active(error)
        self._scoring.fail(error)
        for job in self._scheduler.give_up_all():
            self._resolve(job, error, Outcome.FAILED)
        self._joining.keep(self._scheduler.is_preparing)
        while waiting := self._scheduler.next_in_line():
            self._inbox.left(waiting)
            for job in waiting:
                self._could_not_prepare(job, error)

    def _fail_active(self, error: Exception) -> None:
        self._flights.drop()
        while self._scheduler.active:
            slot = len(self._scheduler.active) - 1
            self._backend.zero(slot)
            self._finish(slot, error, Outcome.FAILED)

    def _take_in(self, now: float) -> None:
        """New requests, cancellations and deadlines."""
        post = self._inbox.take()
        for job in post.arrived:
            self._scheduler.submit(job)
        for request_id in post.cancelled:
            self._scheduler.cancel(request_id)
            self._scoring.cancel(request_id)
        for dropped in self._scheduler.sweep(now):
            error, outcome = DROPPED[dropped.reason]
            if dropped.slot is None:
                if dropped.waited:
                    self._inbox.left([dropped.request])
                self._resolve(dropped.request, error(), outcome)
            else:
                self._finish(dropped.slot, error(), outcome)
        for slot in reversed(range(len(self._scheduler.active))):
            job = self._scheduler.active[slot]
            if job.out_of_time(now):
                job.search.stop()
            for index in (index for request_id, index in post.enough if request_id == job.id):
                job.search.stop_one(index)
            if job.search.done:
                self._answer(slot)

    # -- admit ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        queued = self._scheduler.waiting
        began = self._clock()
        ready = self._intake.advance(self._scheduler, busy=self._made_room_for_prompts())
        now = self._clock()
        if queued or self._scheduler.preparing:
            self._counts.encode_seconds += now - began
        self._joining.keep(self._scheduler.is_preparing)
        self._joining.add(ready)
        if not self._joining.jobs:
            return
        if self._flights.under_way:  # what it writes has its place before others get theirs
            self._settle(*self._flights.collect())
        active = self._scheduler.active
        self._make_room(len(active) + len(self._joining.jobs))
        while (each := self._joining.next(len(active), others_run=bool(active))) is not None:
            job = each.job
            job.started, job.encode_seconds = job.started or began, now - (job.started or began)
            slot = self._scheduler.start(job)
            self._backend.place(slot, each.memory, job.start())
            self._counts.admitted += 1

    def _made_room_for_prompts(self) -> bool:
        """While others decode: whether that was to do between these two steps, instead of more of a prompt."""
        active = self._scheduler.active
        if not (active and self._scheduler.preparing):
            return False
        if not self._flights.under_way:
            relayouts = self._counts.relayouts
            self._make_room(len(active))
            if self._counts.relayouts > relayouts:
                return True
        return self._room.expect(active, self._scheduler.in_preparation())

    def _could_not_prepare(self, job: Job, error: Exception) -> None:
        self._scheduler.give_up(job)
        self._resolve(job, error, Outcome.FAILED)

    # -- decode --------------------------------------------------------------------------------------------------

    def _make_room(self, batch: int) -> None:
        """For a step of so many, with those in mind who are about to join."""
        active, joining = self._scheduler.active, self._joining
        copies = self._room.fit(active, joining.jobs, batch, kept=max(len(active), joining.rows))
        self._counts.relayouts += copies.relayouts
        self._counts.compactions += copies.compactions

    def _decode_and_settle(self) -> None:
        began = self._clock()
        try:
            jobs, outputs = self._next_step()
        except Exception:
            log.exception(
                "a step of %s failed; its %d requests are answered with an error",
                self.manifest.name,
                len(self._scheduler.active),
            )
            self._fail_active(ComputeError("the step failed"))
            return
        self._counts.decode_seconds += self._clock() - began
        self._intake.stepped(self._counts.decode_seconds)
        self._settle(jobs, outputs)

    def _next_step(self) -> tuple[list[Job], StepOutputs]:
        """Asks for a step, where none is under way; and for the one behind it, where that can be known already."""
        jobs, vocabulary = self._scheduler.active, self.manifest.vocabulary.target_size
        if not self._flights.under_way:
            self._make_room(len(jobs))
            self._flights.launch(jobs, step_inputs(jobs, self._room.shape.beams, vocabulary))
        if self._flights.may_follow(jobs, self._room.shape, self._scheduler.waiting > 0):
            self._flights.launch(jobs, step_inputs(jobs, self._room.shape.beams, vocabulary, ahead=1))
        return self._flights.collect()

    # -- settle --------------------------------------------------------------------------------------------------

    def _settle(self, jobs: Sequence[Job], outputs: StepOutputs) -> None:
        """`jobs` are those who took part, by row. Since then some may have moved to other slots, or be gone."""
        now = self._clock()
        broken = np.isnan(outputs.candidate_scores.sum(axis=1)).tolist()
        views = step_views(outputs, jobs)
        # From the last row down, so that a slot that moves into a freed one has been settled already.
        for row, job in reversed(list(enumerate(jobs))):
            slot = self._slot_of(job, row)
            if slot is None:
                continue
            job.first_token = job.first_token or now
            if broken[row]:
                log.error("request %d of %s: the model's scores are not numbers", job.id, self.manifest.name)
                self._backend.zero(slot)
                self._finish(slot, ComputeError("the model's scores are not numbers"), Outcome.FAILED)
                continue
            job.search.advance(views[row])
            if job.search.done:
                self._answer(slot)
            else:
                self._tell(job)

    def _slot_of(self, job: Job, guess: int) -> int | None:
        active = self._scheduler.active
        if guess < len(active) and active[guess] is job:
            return guess
        return next((slot for slot, other in enumerate(active) if other is job), None)

    def _tell(self, job: Job) -> None:
        try:
            job.tell()
        except Exception:
            log.exception("nobody took the news of request %d", job.id)

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
        self._inbox.served(timings.encode + timings.decode)
        self._finish(slot, Result(hypotheses, timings, job.cached_tokens), Outcome.OK)

    def _aligned(self, job: Job, hypothesis: Hypothesis) -> Hypothesis:
        prefix = job.request.options.prefix
        start = self.manifest.vocabulary.start_id
        scored = self._backend.score(job.request.reads, (*prefix, *hypothesis.tokens), start)
        assert scored.attention is not None
        rows = tuple(tuple(row) for row in scored.attention[len(prefix) :].tolist())
        return replace(hypothesis, alignment=rows)

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

    def _scored(self, finished: Finished) -> None:
        self._counts.finished.append(finished)

    # -- report --------------------------------------------------------------------------------------------------

    def _report(self, began: float, active: int) -> StepStats:
        counts, shape = self._counts, self._room.shape
        prompts = self._intake.report()
        stats = StepStats(
            slots=self.plan.slots,
            active=active,
            remaining=len(self._scheduler.active),
            queued=self._scheduler.waiting + len(self._scoring),
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
            prompt_tokens=prompts.tokens,
            cached_prompt_tokens=prompts.cached_tokens,
            prefix_cache_bytes=prompts.cache_bytes,
        )
        self.observe(stats)
        return stats
