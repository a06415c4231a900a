"""One model as its callers see it: a request in, its translations out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from protos import beamline_pb2 as pb
from serving.bridge import Decoder, decode_all
from serving.config import TextLimits
from serving.engine.request import Result
from serving.text.inputs import InputReader, PreparedInput
from serving.text.protocol import ModelCard, Tokenizer
from serving.text.replies import ReplyBuilder, Wanted

Answer = TypeVar("Answer")

# Bytes of a request that are tokenised in about a millisecond; more would keep the event loop from others.
_SMALL = 2 * 1024


class Translator:
    def __init__(
        self,
        card: ModelCard,
        engine: Decoder,
        source: Tokenizer,
        target: Tokenizer,
        limits: TextLimits,
        workers: Executor,
    ) -> None:
        self.card = card
        self._engine = engine
        self._reader = InputReader(card, source, target, limits)
        self._replies = ReplyBuilder(target)
        self._max_in_flight = limits.max_in_flight
        self._workers = workers

    async def translate(self, request: pb.TranslateRequest, deadline: float | None) -> pb.TranslateResponse:
        """`deadline` is on `time.monotonic()`."""
        large = request.ByteSize() > _SMALL
        prepared = await self._run(large, lambda: self._reader.read(request))
        jobs = [job for item in prepared for job in item.jobs]
        results = await decode_all(self._engine, jobs, deadline, self._max_in_flight)
        return await self._run(large, lambda: self._response(request, prepared, results))

    async def _run(self, large: bool, work: Callable[[], Answer]) -> Answer:
        if large:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        return work()

    def _response(
        self, request: pb.TranslateRequest, prepared: list[PreparedInput], results: list[Result]
    ) -> pb.TranslateResponse:
        wanted = Wanted.by(request.options)
        remaining = iter(results)
        return pb.TranslateResponse(
            model=self.card.name,
            version=str(self.card.version),
            translations=[
                self._replies.translation(item, [next(remaining) for _ in item.jobs], wanted) for item in prepared
            ],
        )
