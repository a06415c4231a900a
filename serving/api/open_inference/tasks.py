"""What a question means to a model of each kind: all at once, or as it comes.

A piece of a stream has the text to be appended and, as the parameter `index`, the number of its text. A score comes
with the last piece of a translation; before that, and with a language model's pieces, it is minus infinity.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference import pooled
from beamline.serving.api.open_inference.infer import SCORE, TOKEN_IDS, WRITTEN, Found, Question, answer, read_question
from beamline.serving.api.open_inference.parameters import Options, PooledOptions
from beamline.serving.errors import InvalidRequest
from beamline.serving.models.registry import Model
from beamline.serving.text.generator import Generator
from beamline.serving.text.pooled import PooledModel
from beamline.serving.text.translator import Translator

_SMALL = 32 * 1024  # bytes; taking larger requests apart would keep the event loop from others
_MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    response: oip.ModelInferResponse
    last: bool


async def read(request: oip.ModelInferRequest, model: Model) -> Question:
    options, outputs = _options(model), WRITTEN if not isinstance(model, PooledModel) else pooled.outputs(model.card)
    if request.ByteSize() > _SMALL:
        return await asyncio.to_thread(read_question, request, options, outputs)
    return read_question(request, options, outputs)


def _options(model: Model) -> Options:
    if isinstance(model, PooledModel):
        return PooledOptions()
    return pb.DecodingOptions() if isinstance(model, Translator) else pb.GenerationOptions()


async def once(model: Model, question: Question, size: int, deadline: float | None) -> oip.ModelInferResponse:
    """`size` is the request's, in bytes."""
    if isinstance(model, PooledModel):
        return await pooled.once(model, question, size, deadline)
    name, version = model.card.name, str(model.card.version)
    if isinstance(model, Translator):
        response = await model.translate(_translation(question), deadline)
        rows = [[_hypothesis(each) for each in found.hypotheses] for found in response.translations]
        return answer(question, name, version, rows)
    requests = _generations(question)
    try:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(model.once(request, deadline)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    rows = [[_generation(each) for each in call.result().generations] for call in calls]
    return answer(question, name, version, rows)


async def pieces(model: Model, question: Question, deadline: float | None) -> AsyncGenerator[Piece]:
    """Leave it through `contextlib.aclosing`."""
    assert not isinstance(model, PooledModel)  # it has no parameter `stream`
    name, version = model.card.name, str(model.card.version)
    stream = (
        _translated(model, question, deadline)
        if isinstance(model, Translator)
        else _generated(model, question, deadline)
    )
    async with aclosing(stream) as found:
        async for index, piece, last in found:
            response = answer(question, name, version, [[piece]])
            response.parameters["index"].int64_param = index
            yield Piece(response, last)


async def _translated(
    model: Translator, question: Question, deadline: float | None
) -> AsyncGenerator[tuple[int, Found, bool]]:
    request = _translation(question)
    left = len(request.inputs)
    async with aclosing(model.stream(request, deadline)) as replies:
        async for reply in replies:
            over = reply.HasField("translation")
            left -= over
            whole = _hypothesis(reply.translation.hypotheses[0]) if over else Found("")
            yield reply.input, Found(reply.text, whole.score, whole.token_ids), not left


async def _generated(
    model: Generator, question: Question, deadline: float | None
) -> AsyncGenerator[tuple[int, Found, bool]]:
    requests = _generations(question)
    if len(requests) > 1:
        raise InvalidRequest(f"a stream of a language model takes one prompt; the request has {len(requests)}")
    async with aclosing(model.stream(requests[0], deadline)) as replies:
        async for reply in replies:
            ids = tuple(token.id for token in reply.tokens)
            yield reply.index, Found(reply.text, token_ids=ids), reply.HasField("usage")


def _translation(question: Question) -> pb.TranslateRequest:
    options = pb.DecodingOptions()
    options.CopyFrom(question.parameters.options)
    options.return_scores = question.wants(SCORE)
    options.return_tokens = question.wants(TOKEN_IDS)
    return pb.TranslateRequest(inputs=question.inputs, options=options, **question.parameters.languages)


def _generations(question: Question) -> list[pb.GenerateRequest]:
    if not 1 <= len(question.inputs) <= _MOST_PROMPTS:
        count = len(question.inputs)
        raise InvalidRequest(f"the request has {count} prompts; a language model takes 1 to {_MOST_PROMPTS}")
    options = pb.GenerationOptions()
    options.CopyFrom(question.parameters.options)
    options.return_tokens = question.wants(TOKEN_IDS)
    options.return_log_probs = question.wants(SCORE) and not question.parameters.stream
    requests = []
    for item in question.inputs:
        request = pb.GenerateRequest(options=options)
        if item.WhichOneof("kind") == "text":
            request.text = item.text
        else:
            request.token_ids.CopyFrom(item.token_ids)
        requests.append(request)
    return requests


def _hypothesis(hypothesis: pb.Hypothesis) -> Found:
    return Found(hypothesis.text, hypothesis.score, tuple(token.id for token in hypothesis.tokens))


def _generation(generation: pb.Generation) -> Found:
    return Found(generation.text, generation.score, tuple(token.id for token in generation.tokens))
