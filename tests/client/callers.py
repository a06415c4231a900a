"""Both clients behind one interface, so that one test is for both; and a server that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from beamline import AsyncClient, Client, LoadedModel
from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.config import ServeConfig, TextLimits
from beamline.serving.in_process import InProcess
from beamline.serving.models.loader import ModelLoader
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.text.host_work import TextWorkers
from tests.serving.doubles import EngineDouble, makers
from tests.serving.fake_lm import GatedEngine


class SyncCaller:
    def __init__(self, target: str | None = None, **options: Any) -> None:
        self.client: Any = Client(target, **options)

    async def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *arguments, **options)

    async def pieces(self, method: str, *arguments: Any, first: int | None = None, **options: Any) -> list[Any]:
        """Of a stream; with `first`, so many, and then it is closed."""

        def read() -> list[Any]:
            stream = getattr(self.client, method)(*arguments, **options)
            found = []
            for piece in stream:
                found.append(piece)
                if len(found) == first:
                    stream.close()
            return found

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


class AsyncCaller:
    def __init__(self, target: str | None = None, **options: Any) -> None:
        self.client: Any = AsyncClient(target, **options)

    async def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*arguments, **options)

    async def pieces(self, method: str, *arguments: Any, first: int | None = None, **options: Any) -> list[Any]:
        found = []
        async with aclosing(getattr(self.client, method)(*arguments, **options)) as stream:
            async for piece in stream:
                found.append(piece)
                if len(found) == first:
                    break
        return found

    async def close(self) -> None:
        await self.client.close()


Caller = SyncCaller | AsyncCaller


class LoadedCaller(SyncCaller):
    """The same with a model in process."""

    def __init__(self, model: LoadedModel) -> None:
        self.client = model


class AsyncLoadedCaller(AsyncCaller):
    def __init__(self, model: LoadedModel) -> None:
        self.client = model.aio


def in_process(engine: EngineDouble | GatedEngine, timeout: float | None = None, **limits: int) -> LoadedModel:
    """A model with this engine. Its queue is the engine's."""
    made = makers(engine) if isinstance(engine, EngineDouble) else engine.makers()
    workers = TextWorkers()
    loader = ModelLoader(ServeConfig(fake=True, text=TextLimits(**limits)), made, Metrics(), workers)
    return LoadedModel(InProcess(loader.fakes()[0], made.thread(), workers), timeout)


class Refusal(Exception):
    def __init__(self, code: grpc.StatusCode, sentence: str = "refused", pushback_ms: int | None = None) -> None:
        super().__init__(sentence)
        self.code = code
        self.trailing = [("x-request-id", "scripted")]
        if pushback_ms is not None:
            self.trailing.append(("grpc-retry-pushback-ms", str(pushback_ms)))


class Scripted(beamline_pb2_grpc.InferenceServicer):
    """Echoes, but each call first takes the next step of the script: a refusal, or None."""

    def __init__(self, *script: Refusal | None, after_first_piece: Refusal | None = None) -> None:
        self._script = list(script)
        self._after_first_piece = after_first_piece
        self.calls: list[Any] = []
        self.metadata: list[dict[str, Any]] = []

    async def _arrived(self, request: Any, context: Any) -> None:
        self.calls.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        step = self._script.pop(0) if self._script else None
        if step is not None:
            await context.abort(step.code, str(step), tuple(step.trailing))

    async def Translate(self, request: pb.TranslateRequest, context: Any) -> pb.TranslateResponse:
        await self._arrived(request, context)
        return pb.TranslateResponse(
            model="scripted",
            version="1",
            translations=[pb.Translation(hypotheses=[pb.Hypothesis(text=item.text)]) for item in request.inputs],
        )

    async def TranslateStream(self, request: pb.TranslateRequest, context: Any) -> AsyncIterator[pb.TranslateReply]:
        await self._arrived(request, context)
        for letter in request.inputs[0].text:
            yield pb.TranslateReply(text=letter)
            if self._after_first_piece is not None:
                step = self._after_first_piece
                await context.abort(step.code, str(step), tuple(step.trailing))


@asynccontextmanager
async def scripted(servicer: Scripted) -> AsyncIterator[str]:
    """Its target."""
    server = grpc.aio.server()
    beamline_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def texts(answers: Sequence[Any]) -> list[str]:
    return [answer.text for answer in answers]
