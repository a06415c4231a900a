"""Score calls: texts in, what the model thinks of each of their tokens out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.async_engine import AnyEngine, score_all
from beamline.serving.engine.request import Request
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.host_work import HostTime, ObserveHostTime, TextWorkers, ignore
from beamline.serving.text.inputs import InputReader
from beamline.serving.text.languages import Direction, LanguageReader
from beamline.serving.text.model_card import ModelCard, Tokenizer

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # a target, and what should follow each of its tokens

_MAX_TEXTS = 256
_MAX_TOKENS = 16384  # of one call
_WRITTEN_BYTES = 16  # for each token that was scored, at least


class TextScorer:
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
        self._workers = workers
        self._observe = observe
        self._card = card
        self._engine = engine
        self._source = source
        self._target = target
        self._limits = limits
        self._inputs = InputReader(card.name, "score", limits)
        self._languages = LanguageReader(card)

    async def score(self, request: pb.ScoreRequest, deadline: float | None) -> pb.ScoreResponse:
        if not 1 <= len(request.texts) <= _MAX_TEXTS:
            raise InvalidRequest(f"the call has {len(request.texts)} texts; give 1 to {_MAX_TEXTS}")
        time, translates = HostTime(), self._card.translates
        with time.reads():
            sources, targets, pairs = await self._workers.run(request.ByteSize(), lambda: self._read(request))
        found = await self._ask(sources if translates else None, pairs, deadline)
        with time.writes():
            write = partial(self._response, targets, found)
            response = await self._workers.run(_WRITTEN_BYTES * sum(map(len, targets)), write)
        self._observe(time, len(pairs))
        return response

    def _read(self, request: pb.ScoreRequest) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[Pair]]:
        is_text = any(item.WhichOneof("kind") == "text" for item in request.sources)
        direction = self._languages.read(request.source_language, request.target_language, text=is_text)
        sources = self._sources(request, direction)
        targets = [self._ids(f"texts[{i}]", text, self._target, "target") for i, text in enumerate(request.texts)]
        if sum(map(len, targets)) > _MAX_TOKENS:
            raise InvalidRequest(f"the texts have more than {_MAX_TOKENS} tokens; send them in several calls")
        begins = [self._beginning(item, direction) for item in request.texts]
        pairs = [
            self.pair(ids, f"texts[{i}]", begin) for i, (ids, begin) in enumerate(zip(targets, begins, strict=True))
        ]
        return sources, targets, pairs

    def _response(self, targets: Sequence[Sequence[int]], found: Sequence[Sequence[float]]) -> pb.ScoreResponse:
        return pb.ScoreResponse(
            model=self._card.name,
            version=str(self._card.version),
            # What a language forces is no part of a text.
            scores=[
                self._scored(ids, values[max(0, len(values) - len(ids)) :])
                for ids, values in zip(targets, found, strict=True)
            ],
        )

    def pair(self, ids: Sequence[int], where: str, begin: Sequence[int] = ()) -> Pair:
        """What the model reads, and what should follow. Where nothing stands before the first token, it can't be
        scored. `begin`: the start token, where it is not the model's, and what is forced behind it."""
        start = self._card.vocabulary.decoder_start_id
        if begin:
            return (*begin, *ids[:-1]), (*begin[1:], *ids)
        if start is not None and (self._card.translates or len(ids) == 1):
            return (start, *ids[:-1]), tuple(ids)
        if len(ids) < 2:
            raise InvalidRequest(f"{where} has one token, and nothing stands before it: give at least two")
        return tuple(ids[:-1]), tuple(ids[1:])

    async def log_probs(self, ids: Sequence[int], deadline: float | None) -> list[float | None]:
        """Of a prompt, one for each token; the first may have none."""
        try:
            pair = self.pair(ids, "the prompt")
        except InvalidRequest:
            return [None] * len(ids)
        values = (await self._ask(None, [pair], deadline))[0]
        return [*[None] * (len(ids) - len(values)), *values]

    async def _ask(
        self, sources: list[tuple[int, ...]] | None, pairs: Sequence[Pair], deadline: float | None
    ) -> list[tuple[float, ...]]:
        requests = [
            Request(() if sources is None else sources[number], target=target, labels=labels)
            for number, (target, labels) in enumerate(pairs)
        ]
        found = await score_all(self._engine, requests, deadline, self._limits.max_in_flight)
        return [scores.log_probs for scores in found]

    def _beginning(self, item: pb.Input, direction: Direction) -> tuple[int, ...]:
        """What a translation in its language begins with; of token ids, the start token alone."""
        start = self._card.vocabulary.decoder_start_id if direction.start_id is None else direction.start_id
        if start is None or not self._card.translates:
            return ()
        forced = direction.forced_bos_id
        return (start,) if forced is None or item.WhichOneof("kind") != "text" else (start, forced)

    def _sources(self, request: pb.ScoreRequest, direction: Direction) -> list[tuple[int, ...]]:
        given = list(request.sources)
        if not self._card.translates:
            if given:
                raise InvalidRequest(f"model {self._card.name} has no source: leave sources empty")
            return []
        if not given:
            raise InvalidRequest(
                f"model {self._card.name} translates, and no source is given: say what the texts translate (source)"
            )
        if len(given) not in (1, len(request.texts)):
            raise InvalidRequest(
                f"there are {len(given)} sources for {len(request.texts)} texts; give one for all, or one for each"
            )
        ids = [self._source_ids(f"sources[{i}]", each, direction) for i, each in enumerate(given)]
        return ids if len(ids) == len(request.texts) else ids * len(request.texts)

    def _source_ids(self, where: str, item: pb.Input, direction: Direction) -> tuple[int, ...]:
        is_text = item.WhichOneof("kind") == "text"
        ids = self._ids(where, item, self._source, "source", direction.length if is_text else 0)
        if not is_text:
            return ids
        self._languages.completed(direction, f"{where}.text", ids)
        return direction.around(ids)

    def _ids(self, where: str, item: pb.Input, tokenizer: Tokenizer, side: str, around: int = 0) -> tuple[int, ...]:
        limits, vocabulary = self._card.limits, self._card.vocabulary
        size = vocabulary.source_size if side == "source" else vocabulary.target_size
        longest = limits.max_source_length - around if side == "source" else limits.max_target_length - 1
        ids = self._inputs.read(where, item, tokenizer, size, f"{side} vocabulary")
        if len(ids) > longest:
            raise InvalidRequest(f"{where} has {len(ids)} tokens; this model reads at most {longest}")
        return tuple(ids)

    def _scored(self, ids: Sequence[int], log_probs: Sequence[float]) -> pb.ScoredText:
        unscored = len(ids) - len(log_probs)
        tokens = [pb.GeneratedToken(id=token, piece=self._target.token(token)) for token in ids]
        for message, value in zip(tokens[unscored:], log_probs, strict=True):
            message.log_prob = value
        total = math.fsum(log_probs)
        return pb.ScoredText(
            tokens=tokens,
            log_prob=total,
            perplexity=math.exp(min(700.0, -total / len(log_probs))),
            scored_tokens=len(log_probs),
        )
