"""Score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from beamline._calls.answers import token_of
from beamline._calls.operation import Operation
from beamline._calls.requests import LANGUAGES, Options, items_of, rpc_of, settings_of, template_of, with_items
from beamline.errors import InvalidItem, InvalidRequest
from beamline.protos import beamline_pb2 as pb
from beamline.types import Input, Score

_SCORE = rpc_of("Score", pb.ScoreRequest, pb.ScoreResponse)
_BYTES_PER_CALL = 8192  # a server scores up to 16,384 tokens in a call, and a byte is at most one token


def score(text: Input | Iterable[Input], source: Input | Iterable[Input] | None, options: Options) -> Operation[Score]:
    single, items = items_of(text)
    template = template_of("score", pb.ScoreRequest(), options, LANGUAGES)
    sources: list[Any] = []
    if source is not None:
        one, sources = items_of(source)
        if not one and len(sources) != len(items):
            raise InvalidRequest(
                f"there are {len(sources)} sources for {len(items)} texts; give one for all, or one for each"
            )
        if one:
            sources = sources * len(items)
        for index, item in enumerate(sources):
            if isinstance(item, InvalidItem):
                items[index] = InvalidItem(f"source of {item}", index)

    def request(indices: Sequence[int]) -> pb.ScoreRequest:
        texts = [items[index] for index in indices]
        return with_items(template, texts=texts, sources=[sources[index] for index in indices] if sources else [])

    def answers(response: pb.ScoreResponse) -> list[Score]:
        return [
            Score(
                tuple(map(token_of, each.tokens)),
                each.log_prob,
                each.perplexity,
                each.scored_tokens,
                response.model,
                response.version,
            )
            for each in response.scores
        ]

    return Operation(_SCORE, settings_of(options), single, items, request, answers, bytes_per_call=_BYTES_PER_CALL)
