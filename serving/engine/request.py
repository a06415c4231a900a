"""One sequence, from submission to answer: the one type that carries it through queue, scheduler and engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Source, Start
from beamline.serving.contract.call import DEFAULT_PRIORITY
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.stats import Finished, Outcome, Stay
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Answer, Output, Piece, Result, TraceStep
from beamline.serving.engine.search.beam_search import BeamSearch
from beamline.serving.engine.search.history import Beginning
from beamline.serving.engine.search.logits_processors import LogitsProcessors
from beamline.serving.engine.search.sampler import Sampler

log = logging.getLogger(__name__)

_ids = itertools.count(1)
_LONGER = 1.5  # a group's longest source is at most so many times its shortest, and a few tokens
_A_FEW = 8


@dataclass(eq=False, slots=True)
class Request:
    """Decoded where it has options; else answered by one run: scored where it has labels, or read by a pooled model.
    `on_output` gets its pieces, where it `streams`, and exactly one answer: on `loop`, or, without one, on the
    engine's thread, where it must not block."""

    source: tuple[int, ...] = ()  # what an encoder reads, or a prompt
    options: DecodingOptions | None = None
    on_output: Callable[[Output], None] | None = None
    deadline: float | None = None  # on the engine's clock
    priority: int = DEFAULT_PRIORITY  # 0 is most urgent
    queue_deadline: float | None = None  # by when it must have a slot, on the engine's clock
    stop_at: float | None = None  # when its time limit is over; left out: counted from submission
    streams: bool = False
    features: NDArray[np.float32] | None = None  # instead of a source, which is empty then
    target: tuple[int, ...] = ()  # to score, and
    labels: tuple[int, ...] = ()  # what should follow each of its tokens
    loop: asyncio.AbstractEventLoop | None = None
    beginning: Beginning | None = None  # of every answer to a prompt, where somebody has looked at it before
    tenant: str = ""  # who sent it: the prefix cache keeps tenants apart
    id: int = field(default_factory=lambda: next(_ids))

    # What the engine notes of it.
    submitted: float = field(default=0.0, init=False)
    started: float = field(default=0.0, init=False)
    first_token: float | None = field(default=None, init=False)
    encode_seconds: float = field(default=0.0, init=False)
    stays: list[tuple[int, float]] = field(default_factory=list, init=False)  # its slots, and since when
    cached_tokens: int = field(default=0, init=False)  # of the prompt
    encode_alone: bool = field(default=False, init=False)  # it was in a group that could not be encoded
    memory: Any = field(default=None, init=False, repr=False)  # the backend's, from its encoding or prefill to its slot
    search: BeamSearch = field(init=False, repr=False)
    processors: LogitsProcessors = field(init=False, repr=False)
    streamed: list[int] = field(default_factory=list, init=False)  # how many tokens of each hypothesis were streamed

    def begin(self, options: DecodingOptions, manifest: Manifest) -> None:
        """What decoding by this model needs: the search's tree and the logits processors."""
        source, vocabulary = self.source, manifest.vocabulary
        before: tuple[int, ...] = ()
        if manifest.task == "translate":
            start = vocabulary.start_id if options.start_id is None else options.start_id
        elif manifest.graphs.prefill is not None:
            before, start = source[:-1], source[-1]
        else:  # the prompt is decoded step by step, as a prefix that is forced
            start, rest = source[0], source[1:]
            shortest = options.min_length + len(rest) if options.min_length else 0
            options = replace(options, prefix=rest, max_length=options.max_length + len(rest), min_length=shortest)
        if self.stop_at is None and options.time_limit is not None:
            self.stop_at = self.submitted + options.time_limit
        search = Sampler if options.samples else BeamSearch
        self.search = search(options, start, vocabulary.eos_ids, len(before))
        beginning = self.beginning or Beginning((*before, start, *options.prefix), options.no_repeat_ngram_size)
        self.processors = LogitsProcessors(options, vocabulary.eos_ids, beginning, manifest.forbidden_in_graph)
        self.streamed = [0] * options.beam_size

    def start(self) -> Start:
        options = self.search.options
        independent = options.samples or options.beam_size == 1
        forced = () if options.forced_bos_id is None else (options.forced_bos_id,)
        named = (*forced, *options.prefix, *(word for word, bias in options.logit_bias if bias > 0))
        return Start(self.search.start_token, options.beam_size, independent, options.samples, named)

    @property
    def encoder_input(self) -> Source:
        return self.source if self.features is None else self.features

    @property
    def source_length(self) -> int:
        return len(self.source) if self.features is None else len(self.features)

    @property
    def prefix(self) -> tuple[int, ...]:
        """What the answer begins with by force."""
        return () if self.options is None else self.options.prefix

    @property
    def most_entries(self) -> int:
        """The most cache entries that it can come to need: when no two beams share anything."""
        options = self.search.options
        return self.search.used_entries + options.beam_size * (options.max_length - 1)

    def out_of_time(self, now: float) -> bool:
        return self.stop_at is not None and now >= self.stop_at

    def new_pieces(self) -> list[Piece | TraceStep]:
        """What has become certain since it was last asked, where it streams; and the search's steps, where it is
        traced."""
        if not self.streams:
            return []
        pieces = self.search.new_pieces(self.streamed)
        for piece in pieces:
            self.streamed[piece.index] += len(piece.tokens)
        return [*pieces, *(() if self.search.tracer is None else self.search.tracer.take())]

    def record(self, answer: Answer, outcome: Outcome, now: float) -> Finished:
        ends = [*(since for _, since in self.stays[1:]), now]
        return Finished(
            outcome=outcome,
            queue_seconds=(self.started or now) - self.submitted,
            first_token_seconds=None if self.first_token is None else self.first_token - self.submitted,
            total_seconds=now - self.submitted,
            source_tokens=self.source_length + len(self.target),  # all of them are read
            target_tokens=len(answer.hypotheses[0].tokens) if isinstance(answer, Result) else 0,
            encode_seconds=self.encode_seconds,
            stays=tuple(Stay(slot, end - since) for (slot, since), end in zip(self.stays, ends, strict=False)),
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request: Request
    output: Output


class OutputCollector:
    """What a step makes for its readers, and what statistics want to know of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._outputs: list[RequestOutput] = []
        self._finished: list[Finished] = []

    def stream(self, request: Request) -> None:
        self._outputs += [RequestOutput(request, piece) for piece in request.new_pieces()]

    def answer(self, request: Request, answer: Answer, outcome: Outcome) -> None:
        request.memory = None  # of one that never had its slot: who waits for the answer must not keep the device's
        self._outputs.append(RequestOutput(request, answer))
        self._finished.append(request.record(answer, outcome, self._clock()))

    def take(self) -> tuple[list[RequestOutput], tuple[Finished, ...]]:
        """All since the last time."""
        outputs, finished = self._outputs, tuple(self._finished)
        self._outputs, self._finished = [], []
        return outputs, finished


def deliver(outputs: Iterable[RequestOutput]) -> None:
    """Hands a step's outputs to their readers: one call to each event loop, however many tokens there are."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[RequestOutput]] = {}
    for each in outputs:
        by_loop.setdefault(each.request.loop, []).append(each)
    for loop, group in by_loop.items():
        if loop is None:
            _hand_over(group)
        else:
            with suppress(RuntimeError):  # a server was torn down, and its loop is closed
                loop.call_soon_threadsafe(_hand_over, group)


def _hand_over(outputs: Sequence[RequestOutput]) -> None:
    for each in outputs:
        if each.request.on_output is None:
            continue
        try:
            each.request.on_output(each.output)
        except Exception:
            log.exception("the reader of request %d failed", each.request.id)


def groups_by_length(
    requests: Iterable[Request], length: Callable[[Request], int], most_tokens: int, longer: float = _LONGER
) -> Iterator[list[Request]]:
    """Groups to run together: of similar length, so that little is computed for padding, and not too large."""
    group: list[Request] = []
    for request in sorted(requests, key=length):
        too_long = group and length(request) > longer * length(group[0]) + _A_FEW
        if group and (too_long or length(request) * (len(group) + 1) > most_tokens):
            yield group
            group = []
        group.append(request)
    if group:
        yield group
