"""Classify and Embed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from beamline._calls.answers import timings_of
from beamline._calls.operation import Operation
from beamline._calls.requests import Options, items_of, rpc_of, settings_of, template_of, with_items
from beamline.protos import beamline_pb2 as pb
from beamline.types import Classification, Embedding, Input, Label

_CLASSIFY = rpc_of("Classify", pb.ClassifyRequest, pb.ClassifyResponse)
_EMBED = rpc_of("Embed", pb.EmbedRequest, pb.EmbedResponse)


def classify(text: Input | Iterable[Input], options: Options) -> Operation[Classification]:
    single, items = items_of(text)
    template = template_of("classify", pb.ClassifyRequest(), options, ("top_k", "truncate"))

    def request(indices: Sequence[int]) -> pb.ClassifyRequest:
        return with_items(template, inputs=[items[index] for index in indices])

    def answers(response: pb.ClassifyResponse) -> list[Classification]:
        return [
            Classification(
                tuple(Label(label.name, label.index, label.probability) for label in each.labels),
                each.source_tokens,
                timings_of(each.timings),
                response.model,
                response.version,
            )
            for each in response.classifications
        ]

    return Operation(_CLASSIFY, settings_of(options), single, items, request, answers)


def embed(text: Input | Iterable[Input], options: Options) -> Operation[Embedding]:
    single, items = items_of(text)
    template = template_of("embed", pb.EmbedRequest(), options, ("pooling", "normalize", "truncate"))

    def request(indices: Sequence[int]) -> pb.EmbedRequest:
        return with_items(template, inputs=[items[index] for index in indices])

    def answers(response: pb.EmbedResponse) -> list[Embedding]:
        return [
            Embedding(
                tuple(each.values), each.source_tokens, timings_of(each.timings), response.model, response.version
            )
            for each in response.embeddings
        ]

    return Operation(_EMBED, settings_of(options), single, items, request, answers)
