"""A model that classifies or embeds, as its callers see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.contract.backend import Floats
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.engine.async_engine import AnyEngine, read_all
from beamline.serving.engine.outputs import Pooled
from beamline.serving.engine.request import Request
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.host_work import HostTime, ObserveHostTime, TextWorkers, ignore
from beamline.serving.text.inputs import InputReader
from beamline.serving.text.model_card import Tokenizer

_POOLINGS = {
    pb.POOLING_LAST: "last",
    pb.POOLING_MEAN: "mean",
    pb.POOLING_MAX: "max",
    pb.POOLING_ATTENTION: "attention",
}


Read = tuple[int, Pooled]  # how many tokens an input has, and what the model found
Answer = TypeVar("Answer")


class PooledModel:
    def __init__(
        self,
        card: PooledManifest,
        engine: AnyEngine,
        tokenizer: Tokenizer,
        limits: TextLimits,
        workers: TextWorkers,
        observe: ObserveHostTime = ignore,
    ) -> None:
        self._observe = observe
        self.card = card
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._inputs = InputReader(card.name, "read", limits)
        self._workers = workers

    def check_count(self, inputs: int) -> None:
        """Raises `InvalidRequest` for more inputs than one call may have, or none: before they are read."""
        self._inputs.check_count(inputs)

    async def classify(self, request: pb.ClassifyRequest, deadline: float | None) -> pb.ClassifyResponse:
        """`deadline` is on `time.monotonic()`."""
        wanted = self.label_count(request.top_k if request.HasField("top_k") else None)

        def write(found: Sequence[Read]) -> pb.ClassifyResponse:
            return pb.ClassifyResponse(
                model=self.card.name,
                version=str(self.card.version),
                classifications=[
                    pb.Classification(
                        labels=self.labels(pooled, wanted), source_tokens=tokens, timings=_timings(pooled)
                    )
                    for tokens, pooled in found
                ],
            )

        return await self.read(request.ByteSize(), request.inputs, request.truncate, deadline, write)

    async def embed(self, request: pb.EmbedRequest, deadline: float | None) -> pb.EmbedResponse:
        pooling = self.pooling(_POOLINGS.get(request.pooling, str(request.pooling)) if request.pooling else None)
        normalize = request.normalize if request.HasField("normalize") else None

        def write(found: Sequence[Read]) -> pb.EmbedResponse:
            return pb.EmbedResponse(
                model=self.card.name,
                version=str(self.card.version),
                embeddings=[
                    pb.Embedding(
                        values=self.vector(pooled, pooling, normalize).tolist(),
                        source_tokens=tokens,
                        timings=_timings(pooled),
                    )
                    for tokens, pooled in found
                ],
            )

        return await self.read(request.ByteSize(), request.inputs, request.truncate, deadline, write)

    # -- what can be asked for ---------------------------------------------------------------------------------------

    def label_count(self, top_k: int | None) -> int:
        if not self.card.labels:
            raise InvalidRequest(f"model {self.card.name} has no labels: it can embed, but not classify")
        count = len(self.card.labels)
        wanted = count if top_k is None else top_k
        if not 1 <= wanted <= count:
            raise InvalidRequest(f"top_k is {wanted}; this model has {count} labels: 1 to {count}")
        return wanted

    def pooling(self, name: str | None) -> str:
        if name is None:
            return self.card.poolings[0]
        if name not in self.card.poolings:
            raise InvalidRequest(
                f"pooling is {name[:20]}; model {self.card.name} knows {', '.join(self.card.poolings)}"
            )
        return name

    def labels(self, pooled: Pooled, count: int) -> list[pb.Label]:
        """The likeliest first."""
        probabilities = pooled.outputs["probabilities"]
        order = np.argsort(-probabilities, kind="stable")[:count].tolist()
        return [
            pb.Label(name=self.card.labels[index], index=index, probability=float(probabilities[index]))
            for index in order
        ]

    def vector(self, pooled: Pooled, pooling: str, normalize: bool | None) -> Floats:
        """`normalize` None: as the model does."""
        values = pooled.outputs[f"vector_{pooling}"]
        length = float(np.linalg.norm(values.astype(np.float64)))
        wanted = self.card.normalize if normalize is None else normalize
        return values / np.float32(length) if wanted and length > 0 else values

    # -- inputs ------------------------------------------------------------------------------------------------------

    async def read(
        self,
        size: int,
        inputs: Sequence[pb.Input],
        truncate: bool,
        deadline: float | None,
        write: Callable[[Sequence[Read]], Answer],
    ) -> Answer:
        """What `write` makes of what the model found. `size` is the request's, in bytes."""

        time = HostTime()
        with time.reads():
            sources = await self._workers.run(size, lambda: self._sources(inputs, truncate))
        requests = [Request(source) for source in sources]
        found = await read_all(self._engine, requests, deadline, self._limits.max_in_flight)
        values = sum(output.size for pooled in found for output in pooled.outputs.values())
        with time.writes():
            read = [(len(source), pooled) for source, pooled in zip(sources, found, strict=True)]
            answer = await self._workers.run(values, lambda: write(read))
        self._observe(time, len(sources))
        return answer

    def _sources(self, inputs: Sequence[pb.Input], truncate: bool) -> list[tuple[int, ...]]:
        self._inputs.check_count(len(inputs))
        return [self._source(f"inputs[{index}]", item, truncate) for index, item in enumerate(inputs)]

    def _source(self, where: str, item: pb.Input, truncate: bool) -> tuple[int, ...]:
        ids = self._inputs.read(where, item, self._tokenizer, self.card.vocabulary_size)
        limit = self.card.max_source_length
        if len(ids) > limit and not truncate:
            raise InvalidRequest(
                f"{where} has {len(ids)} tokens; this model reads at most {limit}: send less, or set truncate"
            )
        return tuple(ids[:limit])


def _timings(pooled: Pooled) -> pb.Timings:
    return pb.Timings(queue_ms=1000 * pooled.timings.queue, encode_ms=1000 * pooled.timings.encode)
