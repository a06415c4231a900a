"""The methods of `beamline.v1.Inference`, as gRPC and HTTP both call them: find the model, pass the request on.

A method takes a protobuf message and a deadline on `time.monotonic()`, and has the name that it has in beamline.proto.
It returns a message, or it is an asynchronous generator of them, which must be left through `contextlib.aclosing`:
that frees the slots at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from beamline.protos import beamline_pb2 as pb
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.models.registry import Models
from beamline.serving.text.host_work import TextWorkers

SERVICE: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    request: type[Message]
    response: type[Message]
    streams: bool  # its responses

    @property
    def full_name(self) -> str:
        """As gRPC, the scopes of tokens and the metrics name it."""
        return f"/{SERVICE}/{self.name}"


METHODS: dict[str, Method] = {
    method.name: Method(
        method.name, GetMessageClass(method.input_type), GetMessageClass(method.output_type), method.server_streaming
    )
    for method in pb.DESCRIPTOR.services_by_name["Inference"].methods
}


class Inference:
    def __init__(self, models: Models, lifecycle: Lifecycle, workers: TextWorkers) -> None:
        self._models = models
        self._lifecycle = lifecycle
        self.workers = workers

    @contextmanager
    def _call(self, request: Message) -> Iterator[None]:
        with self._lifecycle.call(), self.workers.admitted(request.ByteSize()):
            yield

    async def Translate(self, request: pb.TranslateRequest, deadline: float | None) -> pb.TranslateResponse:
        with self._call(request), self._models.use_translator(request.model, request.version) as model:
            return await model.translate(request, deadline)

    async def TranslateStream(
        self, request: pb.TranslateRequest, deadline: float | None
    ) -> AsyncGenerator[pb.TranslateReply]:
        with self._call(request), self._models.use_translator(request.model, request.version) as model:
            async with aclosing(model.stream(request, deadline)) as replies:
                async for reply in replies:
                    yield reply

    async def Generate(self, request: pb.GenerateRequest, deadline: float | None) -> AsyncGenerator[pb.GenerateReply]:
        with self._call(request), self._models.use_generator(request.model, request.version) as model:
            async with aclosing(model.stream(request, deadline)) as replies:
                async for reply in replies:
                    yield reply

    async def GenerateOnce(self, request: pb.GenerateRequest, deadline: float | None) -> pb.GenerateResponse:
        with self._call(request), self._models.use_generator(request.model, request.version) as model:
            return await model.once(request, deadline)

    async def Score(self, request: pb.ScoreRequest, deadline: float | None) -> pb.ScoreResponse:
        with self._call(request), self._models.use(request.model, request.version) as model:
            return await model.score(request, deadline)

    async def Classify(self, request: pb.ClassifyRequest, deadline: float | None) -> pb.ClassifyResponse:
        with self._call(request), self._models.use_pooled(request.model, request.version) as model:
            return await model.classify(request, deadline)

    async def Embed(self, request: pb.EmbedRequest, deadline: float | None) -> pb.EmbedResponse:
        with self._call(request), self._models.use_pooled(request.model, request.version) as model:
            return await model.embed(request, deadline)
