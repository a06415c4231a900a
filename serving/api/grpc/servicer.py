"""The methods of `beamline.v1.Inference`: find the model, pass the call on."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.models.registry import Models


class InferenceServicer(beamline_pb2_grpc.InferenceServicer):  # type: ignore[misc, unused-ignore]
    def __init__(self, models: Models, lifecycle: Lifecycle) -> None:
        self._models = models
        self._lifecycle = lifecycle

    async def Translate(self, request: pb.TranslateRequest, context: Any) -> pb.TranslateResponse:
        with self._lifecycle.call(), self._models.use_translator(request.model, request.version) as model:
            return await model.translate(request, _deadline(context))

    async def TranslateStream(self, request: pb.TranslateRequest, context: Any) -> None:
        with self._lifecycle.call(), self._models.use_translator(request.model, request.version) as model:
            await _write_all(model.stream(request, _deadline(context)), context)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        with self._lifecycle.call(), self._models.use_generator(request.model, request.version) as model:
            await _write_all(model.stream(request, _deadline(context)), context)

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        with self._lifecycle.call(), self._models.use_generator(request.model, request.version) as model:
            return await model.once(request, _deadline(context))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        with self._lifecycle.call(), self._models.use(request.model, request.version) as model:
            return await model.score(request, _deadline(context))

    async def Classify(self, request: pb.ClassifyRequest, context: Any) -> pb.ClassifyResponse:
        with self._lifecycle.call(), self._models.use_pooled(request.model, request.version) as model:
            return await model.classify(request, _deadline(context))

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        with self._lifecycle.call(), self._models.use_pooled(request.model, request.version) as model:
            return await model.embed(request, _deadline(context))


async def _write_all(replies: AsyncGenerator[Any], context: Any) -> None:
    """Written here, not yielded: so a caller that goes away is noticed here, and its slots are free at once."""
    async with aclosing(replies):
        async for reply in replies:
            await context.write(reply)


def _deadline(context: Any) -> float | None:
    """The caller's deadline on the engine's clock."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
