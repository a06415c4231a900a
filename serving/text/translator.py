"""One model as its callers see it: a request in, its translations out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.async_engine import AnyEngine, decode_all
from beamline.serving.engine.outputs import Piece, Result
from beamline.serving.engine.request import Request
from beamline.serving.engine.stream import Stream
from beamline.serving.text.host_work import HostTime, ObserveHostTime, TextWorkers, ignore
from beamline.serving.text.model_card import ModelCard, Tokenizer
from beamline.serving.text.replies import ReplyBuilder, Wanted
from beamline.serving.text.scoring import TextScorer
from beamline.serving.text.search_traces import search_step
from beamline.serving.text.stopping import StopWatch
from beamline.serving.text.translation_inputs import PreparedInput, TranslationReader
from beamline.serving.text.translation_stream import GrowingTranslation

_WRITTEN_BYTES = 8  # for each token of an answer, at least


class Translator:
    def __init__(
        self,
        card: ModelCard,
        engine: AnyEngine,
        source: Tokenizer,
        target: Tokenizer,
        limits: TextLimits,
        workers: TextWorkers,
        observe: ObserveHostTime = ignore,
    ) -> None:
        self.card = card
        self._engine = engine
        self._reader = TranslationReader(card, source, target, limits)
        self._replies = ReplyBuilder(source, target)
        self._target = target
        self._scorer = TextScorer(card, engine, source, target, limits, workers, observe)
        self._limits = limits
        self._workers = workers
        self._observe = observe

    def check_count(self, inputs: int) -> None:
        """Raises `InvalidRequest` for more inputs than one call may have, or none: before they are read."""
        self._reader.check_count(inputs)

    async def translate(self, request: pb.TranslateRequest, deadline: float | None) -> pb.TranslateResponse:
        """`deadline` is on `time.monotonic()`."""
        time = HostTime()
        with time.reads():
            prepared = await self._workers.run(request.ByteSize(), lambda: self._reader.read(request))
        requests = [each for item in prepared for each in item.requests]
        watch = self._watch(requests, prepared)
        ends = None if watch is None else watch.ends
        results = await decode_all(self._engine, requests, deadline, self._limits.max_in_flight, ends)
        with time.writes():
            write = partial(self._response, request, prepared, results)
            response = await self._workers.run(_WRITTEN_BYTES * _tokens(results), write)
        self._observe(time, len(requests))
        return response

    async def stream(self, request: pb.TranslateRequest, deadline: float | None) -> AsyncGenerator[pb.TranslateReply]:
        """The pieces of every input's translation, as they come. Leave it through `contextlib.aclosing`."""
        time = HostTime()
        with time.reads():
            prepared = await self._workers.run(request.ByteSize(), lambda: self._reader.read(request))
        growing = [GrowingTranslation(item, self._target) for item in prepared]
        places = [(number, part) for number, item in enumerate(prepared) for part in range(len(item.requests))]
        requests = [each for item in prepared for each in item.requests]
        wanted, limits, watch = Wanted.by(request.options), self._limits, self._watch(requests, prepared)
        stream = Stream(self._engine, requests, deadline, limits.max_in_flight, limits.max_unread_tokens)
        async with aclosing(stream.events()) as batches:
            async for batch in batches:
                with time.writes():
                    for request_index, output in batch:
                        number, part = places[request_index]
                        growing[number].take(part, output)
                        if watch and isinstance(output, Piece) and watch.ends(request_index, output):
                            stream.stop(request_index, output.index)
                    changed = sorted({places[request_index][0] for request_index, _ in batch})
                    replies = [self._reply(number, growing[number], wanted) for number in changed]
                for reply in replies:
                    if reply.text or reply.search_steps or reply.HasField("translation"):
                        yield reply
        self._observe(time, len(requests))

    def _watch(self, requests: Sequence[Request], prepared: Sequence[PreparedInput]) -> StopWatch | None:
        """Where there are stop strings: they are the call's, the same for all of its inputs."""
        stops = prepared[0].stops
        return StopWatch(requests, stops, self._target) if stops else None

    def _reply(self, number: int, growing: GrowingTranslation, wanted: Wanted) -> pb.TranslateReply:
        """What is new of one input's translation, and all of it where it is over."""
        steps = [search_step(step, self._target, part) for part, step in growing.new_steps()]
        reply = pb.TranslateReply(input=number, text=growing.new_text(), search_steps=steps)
        if (results := growing.results) is not None:
            reply.translation.CopyFrom(self._replies.translation(growing.prepared, results, wanted, streamed=True))
        return reply

    async def score(self, request: pb.ScoreRequest, deadline: float | None) -> pb.ScoreResponse:
        return await self._scorer.score(request, deadline)

    def _response(
        self, request: pb.TranslateRequest, prepared: list[PreparedInput], results: list[Result]
    ) -> pb.TranslateResponse:
        wanted = Wanted.by(request.options)
        remaining = iter(results)
        return pb.TranslateResponse(
            model=self.card.name,
            version=str(self.card.version),
            translations=[
                self._replies.translation(item, [next(remaining) for _ in item.requests], wanted) for item in prepared
            ],
        )


def _tokens(results: Sequence[Result]) -> int:
    """Of all hypotheses; each has a row of the alignment, where that is wanted."""
    found = (hypothesis for result in results for hypothesis in result.hypotheses)
    return sum(len(each.tokens) + sum(map(len, each.alignment or ())) for each in found)
