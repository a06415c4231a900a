"""The engine of one model: requests join and leave the running batch at every step.

    sweep  -> cancellations, deadlines, time limits
    admit  -> encode newcomers, or prefill some of their prompts; place those who are ready into slots
    decode -> run the step graph on the active slots
    settle -> record candidates, stream what is certain, finish, free slots
    report -> one StepStats record

`submit`, `cancel`, `stop_hypothesis` and `drain` may be called from any thread; the rest is for the engine's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from beamline.serving.contract.backend import Backend, MeasuredBackend, StepOutputs
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.stats import DeviceStats, Outcome, StepStats
from beamline.serving.engine.capacity import Capacity, Plan
from beamline.serving.engine.chunked_prefill import ChunkedPrefill, Pace
from beamline.serving.engine.completion import FAILED_ALONE, Completion, Occupied
from beamline.serving.engine.outputs import out_of_memory
from beamline.serving.engine.pipeline import StepPipeline
from beamline.serving.engine.prefill import EncoderPrefill, Placement, Prefill, could_not_prepare
from beamline.serving.engine.prefix_cache import PrefixCache
from beamline.serving.engine.queue import Admission, WorkQueue
from beamline.serving.engine.request import OutputCollector, Request, RequestOutput
from beamline.serving.engine.scheduler import Scheduler
from beamline.serving.engine.scoring import Scoring
from beamline.serving.engine.search.edits import EditArrays
from beamline.serving.engine.step_arrays import HostPart, host_part, step_inputs, step_views
from beamline.serving.errors import ComputeError, InvalidRequest, OutOfMemory

log = logging.getLogger(__name__)

_MEASURE_EVERY = 32  # steps


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
        share_prefix_cache: bool = False,
        prompt_slowdown: float = 2.0,
        run_ahead: bool = True,
        observe: Callable[[StepStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.plan = plan
        self.reserved_bytes = backend.allocate(plan.slots, plan.largest)
        self.device: int | None = None  # the number of the GPU that it is on
        self.wake: Callable[[], None] = lambda: None  # set by the thread that drives us
        self.observe = observe
        self._backend = backend
        self._clock = clock
        self._queue: WorkQueue[Request] = WorkQueue(Admission(manifest.name, plan.slots, max_queue, early_refusal))
        self._scheduler = Scheduler(self._queue, plan.slots)
        self._outputs = OutputCollector(clock)
        self.completion = Completion(manifest.name, backend, self._queue, self._scheduler, self._outputs, clock)
        self._capacity = Capacity(backend, plan)
        self._placement = Placement(backend)
        self._pipeline = StepPipeline(backend, run_ahead)
        self._edit_arrays = EditArrays(manifest.vocabulary.target_size)
        self._prefill: Prefill
        if manifest.graphs.prefill is None:
            self._prefill = EncoderPrefill(backend, self._outputs)
        else:
            cache, pace = PrefixCache(prefix_cache_bytes, share_prefix_cache), Pace(prompt_slowdown)
            self._prefill = ChunkedPrefill(backend, self._outputs, clock, cache, pace)
        admission = Admission(f"{manifest.name} (scoring)", 1, max_queue, early_refusal)
        give_back = partial(self._prefill.give_back, self._scheduler)
        self._scoring = Scoring(backend, admission, self._outputs, clock, give_back)
        self._stats = StepStats(plan.slots)  # of the step that is running
        self._measured = backend if isinstance(backend, MeasuredBackend) else None
        self._steps = 0

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Raises `Overloaded`, `ShuttingDown`, or `InvalidRequest` where it could never fit."""
        request.submitted = now = self._clock()
        if request.options is None:
            self._scoring.queue.submit(request, now)
        else:
            request.begin(request.options, self.manifest)
            self._check_fits(request)
            self._queue.submit(request, now, len(self._scheduler.active))
        self.wake()

    def _check_fits(self, request: Request) -> None:
        if not self.plan.holds(request.most_entries):
            raise InvalidRequest(
                f"the request may need {request.most_entries} cache entries (its prompt once, and what is generated "
                f"for each of its {request.search.width} beams or samples); this server holds "
                f"{self.plan.most_entries} (cache_entries of its serving.toml): ask for fewer tokens, or fewer beams "
                "or samples"
            )

    def cancel(self, request_id: int) -> None:
        self._queue.cancel(request_id)
        self._scoring.queue.cancel(request_id)
        self.wake()

    def stop_hypothesis(self, request_id: int, index: int = 0) -> None:
        """No more is wanted of one hypothesis: a sample ends where it is; a beam search ends altogether."""
        self._queue.stop(request_id, index)
        self.wake()

    def drain(self) -> None:
        """Refuses new work from now on; what is here is finished."""
        self._queue.close()
        self._scoring.queue.close()
        self.wake()

    @property
    def busy(self) -> bool:
        waiting = self._queue.busy or self._scoring.queue.busy
        # A step in flight uses our memory, also where nobody wants its outputs any more.
        return bool(waiting or self._scheduler.preparing or self._scheduler.active or self._pipeline.in_flight)

    @property
    def load(self) -> int:
        """How many requests are here, to choose between several engines by."""
        queued = self._queue.waiting + self._scoring.queue.waiting
        return queued + len(self._scheduler.preparing) + len(self._scheduler.active)

    def occupied(self) -> list[Occupied]:
        """Who has a slot just now: a look from outside, for people."""
        return self.completion.occupied()

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Everything that happens between two tokens; what it has to say to the requests' readers."""
        began = self._clock()
        self._stats = StepStats(self.plan.slots)
        self._sweep(began)
        self._admit()
        self._stats.active = len(self._scheduler.active)
        if self._stats.active:
            self._decode()
        elif self._pipeline.in_flight:  # of those who have all left
            self._settle(*self._pipeline.collect())
        if self._scoring.queue.busy:
            self._scoring.advance(others_wait=self._stats.active > 0)
        return self._report(began)

    def fail_everything(self, error: Exception) -> list[RequestOutput]:
        """Answers everyone who is here with an error. The engine itself can go on."""
        self._sweep(self._clock())
        self._fail_active(error)
        return self._fail_others(error)

    def abandon(self, error: Exception) -> list[RequestOutput]:
        """Answers everyone who is here, without the device, which is lost. The engine can't go on."""
        self.drain()
        self._pipeline.abandon()
        self.completion.abandon_all(error)
        self._queue.take_cancelled()
        return self._fail_others(error)

    def _fail_others(self, error: Exception) -> list[RequestOutput]:
        """Those who have no slot: to be scored, in preparation, or waiting. Returns all that is to be delivered."""
        self._scoring.fail_everything(error)
        for request in self._scheduler.preparing:
            could_not_prepare(request, error, self._scheduler, self._outputs)
        self._prefill.clear()
        self._placement.keep(self._scheduler.is_preparing)
        for request in self._queue.pop(self._queue.waiting):
            self._outputs.answer(request, error, Outcome.FAILED)
        return self._outputs.take()[0]

    def _fail_active(self, error: Exception) -> None:
        self._pipeline.drop()
        self.completion.fail_all(error)

    def _sweep(self, now: float) -> None:
        """Cancellations, deadlines, time limits, and hypotheses of which no more is wanted."""
        for dropped in self._scheduler.sweep(now):
            if dropped.slot is None:
                self._outputs.answer(dropped.request, dropped.error(), dropped.outcome)
            else:
                self.completion.finish(dropped.slot, dropped.error(), dropped.outcome)
        stopped = self._queue.take_stopped()
        for slot in reversed(range(len(self._scheduler.active))):
            request = self._scheduler.active[slot]
            if not stopped and request.stop_at is None:
                continue
            try:
                if request.out_of_time(now):
                    request.search.stop()
                for index in (index for request_id, index in stopped if request_id == request.id):
                    request.search.stop_one(index)
            except Exception:
                self.completion.fail_alone(slot)
                continue
            if request.search.done:
                self.completion.answer(slot)

    # -- admit ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        began = self._clock()
        queued = self._queue.waiting > 0
        ready = self._prefill.advance(self._scheduler, busy=self._prepared_for_prompts())
        now = self._clock()
        if queued or self._scheduler.preparing:
            self._stats.encode_seconds += now - began
        self._placement.keep(self._scheduler.is_preparing)
        self._placement.add(ready)
        if not self._placement.requests:
            return
        if self._pipeline.in_flight:  # what it writes has its place before others get theirs
            self._settle(*self._pipeline.collect())
        active = self._scheduler.active
        self._fit(len(active) + len(self._placement.requests))
        while (request := self._next_placed()) is not None:
            request.started = request.started or began
            request.encode_seconds = now - request.started
            slot = self.completion.start(request, now)
            try:
                self._backend.place(slot, request.memory, request.start())
            except Exception:
                self.completion.fail_alone(slot)
                continue
            request.memory = None  # the slot has it now
            self._stats.admitted += 1

    def _next_placed(self) -> Request | None:
        """The next request whose memory stands in the slot that it gets."""
        while self._placement.requests:
            active = self._scheduler.active
            try:
                return self._placement.next(len(active), others_run=bool(active))
            except Exception:
                request = self._placement.requests[0]
                log.exception("request %d of %s could not be placed", request.id, self.manifest.name)
                could_not_prepare(request, ComputeError(FAILED_ALONE), self._scheduler, self._outputs)
                self._placement.keep(self._scheduler.is_preparing)
        return None

    def _prepared_for_prompts(self) -> bool:
        """While others decode: whether that was to do between these two steps, instead of more of a prompt."""
        active = self._scheduler.active
        preparing = self._scheduler.preparing
        if not (active and preparing):
            return False
        if not self._pipeline.in_flight:
            relayouts = self._stats.relayouts
            self._fit(len(active))
            if self._stats.relayouts > relayouts:
                return True
        return self._capacity.expect(active, preparing)

    # -- decode --------------------------------------------------------------------------------------------------

    def _fit(self, batch: int) -> None:
        """Fits the arenas to a step of so many, with those in mind who are about to join."""
        active, placement = self._scheduler.active, self._placement
        copies = self._capacity.fit(active, placement.requests, batch, kept=max(len(active), placement.rows))
        self._stats.relayouts += copies.relayouts
        self._stats.compactions += copies.compactions

    def _decode(self) -> None:
        began = self._clock()
        try:
            step = self._run_step()
        except Exception:
            log.exception(
                "a step of %s failed; its %d requests are answered with an error",
                self.manifest.name,
                len(self._scheduler.active),
            )
            self._fail_active(ComputeError("the step failed"))
            self._placement.restart()  # perhaps the arenas were being laid out anew
            return
        if step is None:
            return
        self._stats.decode_seconds += self._clock() - began
        self._prefill.stepped(self._stats.decode_seconds)
        self._settle(*step)

    def _run_step(self) -> tuple[list[Request], StepOutputs] | None:
        """Launches a step, where none is in flight; and the one behind it, where that can be known already. None where
        all requests failed before it."""
        requests = self._scheduler.active
        if not self._pipeline.in_flight:
            parts = self._host_parts()
            if not requests:
                return None
            self._launch_or_refuse(parts)
            if not requests:
                return None
        if self._pipeline.may_follow(requests, self._capacity.shape, self._queue.waiting > 0):
            count, parts = len(requests), self._host_parts(ahead=1)
            if len(requests) == count:  # else the step in flight has more rows than the next one
                with suppress(OutOfMemory):  # then it is asked for when this one is over, and somebody may be refused
                    self._launch(parts)
        return self._pipeline.collect()

    def _launch_or_refuse(self, parts: list[HostPart]) -> None:
        """Where the device has too little memory for a step, one request at a time is refused until it has enough: the
        one with the most edits, else the last that came, or, where nobody has, the longest. Nothing of such a step was
        carried on, so it can be asked for again."""
        requests = self._scheduler.active
        while requests:
            self._fit(len(requests))
            try:
                return self._launch(parts)
            except OutOfMemory as error:
                self._pipeline.drop()
                if self._prefill.give_back(self._scheduler):
                    continue
                edits = [sum(each.edits.size + len(each.forbidden) for each in part.edits) for part in parts]
                grown = [0 if self._stats.admitted else each.search.used_entries for each in requests]
                slot = max(range(len(requests)), key=lambda each: (edits[each], grown[each], each))
                log.error("request %d of %s is refused: %s", requests[slot].id, self.manifest.name, error)
                by_id = {request.id: part for request, part in zip(requests, parts, strict=True)}
                self.completion.finish(slot, out_of_memory(), Outcome.FAILED)
                parts = [by_id[request.id] for request in requests]  # the last slot has moved

    def _launch(self, parts: Sequence[HostPart]) -> None:
        requests, vocabulary = self._scheduler.active, self.manifest.vocabulary.target_size
        beams = self._capacity.shape.beams
        self._pipeline.launch(requests, step_inputs(requests, parts, beams, vocabulary, self._edit_arrays))

    def _host_parts(self, ahead: int = 0) -> list[HostPart]:
        """What the host adds to a step, by slot. A request that fails at that fails alone, and is gone."""
        parts: dict[int, HostPart] = {}
        for slot in reversed(range(len(self._scheduler.active))):
            request = self._scheduler.active[slot]
            try:
                parts[request.id] = host_part(request, ahead)
            except Exception:
                self.completion.fail_alone(slot)
        return [parts[request.id] for request in self._scheduler.active]

    # -- settle --------------------------------------------------------------------------------------------------

    def _settle(self, requests: Sequence[Request], outputs: StepOutputs) -> None:
        """`requests` are those who took part, by row. Since then some may have moved to other slots, or be gone."""
        now = self._clock()
        broken = np.isnan(outputs.candidate_scores.sum(axis=1)).tolist()
        views = step_views(outputs, requests)
        # From the last row down, so that a slot that moves into a freed one has been settled already.
        for row, request in reversed(list(enumerate(requests))):
            slot = self._scheduler.slot_of(request, row)
            if slot is None:
                continue
            request.first_token = request.first_token or now
            if broken[row]:
                self.completion.fail_broken(slot)
                continue
            try:
                request.search.advance(views[row])
                if request.streams and not request.search.done:
                    self._outputs.stream(request)
            except Exception:
                self.completion.fail_alone(slot)
                continue
            if request.search.done:
                self.completion.answer(slot)
        if any(broken):  # who had it may have left, or moved, before this was seen: nobody's slots are clean again
            for slot in range(len(self._scheduler.active), len(requests)):
                self._backend.zero(slot)

    # -- report --------------------------------------------------------------------------------------------------

    def _report(self, began: float) -> list[RequestOutput]:
        stats, shape, active = self._stats, self._capacity.shape, self._scheduler.active
        outputs, stats.finished = self._outputs.take()
        stats.remaining = len(active)
        stats.moves, self.completion.moves = self.completion.moves, 0
        stats.queued = self._queue.waiting + self._scoring.queue.waiting
        stats.live_entries = sum(request.search.used_entries for request in active)
        if stats.active:
            stats.beam_width, stats.cache_length, stats.source_length = shape.beams, shape.cache, shape.source
        self._prefill.report(stats)
        stats.device = self._device_stats()
        stats.step_seconds = self._clock() - began
        self.observe(stats)
        return outputs

    def _device_stats(self) -> DeviceStats | None:
        """Now and then, and when there is nothing else to do: to ask a GPU for its memory takes a moment."""
        self._steps += 1
        if self._measured is None or (self._steps % _MEASURE_EVERY and self._scheduler.active):
            return None
        try:
            return self._measured.device_stats()
        except Exception:  # nobody's answer waits for it
            log.exception("the device of %s does not say how much memory it has", self.manifest.name)
            return None
