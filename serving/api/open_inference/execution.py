"""Runs an inference request on its model, whatever kind of model that is: in one response, or streaming.

A response of a stream has the text to be appended and, as the parameter `index`, the number of its input or sample. A
score comes with the last text of a translation; before that, and with a language model's texts, there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference import pooled
from beamline.serving.api.open_inference.messages import (
    SCORE,
    TEXT_OUTPUTS,
    TOKEN_IDS,
    ParsedRequest,
    TextOutput,
    infer_response,
    parse_request,
)
from beamline.serving.api.open_inference.parameters import Options, PooledOptions
from beamline.serving.errors import InvalidRequest
from beamline.serving.models.registry import Model
from beamline.serving.text.generator import Generator
from beamline.serving.text.pooled import PooledModel
from beamline.serving.text.translator import Translator

_SMALL = 32 * 1024  # bytes; parsing larger requests would keep the event loop from others
_MAX_PROMPTS = 64


async def parse(request: oip.ModelInferRequest, model: Model) -> ParsedRequest:
    options = _options(model)
    outputs = pooled.outputs(model.card) if isinstance(model, PooledModel) else TEXT_OUTPUTS
    check_count = _check_prompts if isinstance(model, Generator) else model.check_count
    if request.ByteSize() > _SMALL:
        return await asyncio.to_thread(parse_request, request, options, outputs, check_count)
    return parse_request(request, options, outputs, check_count)


def _check_prompts(count: int) -> None:
    if not 1 <= count <= _MAX_PROMPTS:
        raise InvalidRequest(f"the request has {count} prompts; a language model takes 1 to {_MAX_PROMPTS}")


def _options(model: Model) -> Options:
    if isinstance(model, PooledModel):
        return PooledOptions()
    return pb.DecodingOptions() if isinstance(model, Translator) else pb.GenerationOptions()


async def infer(model: Model, request: ParsedRequest, size: int, deadline: float | None) -> oip.ModelInferResponse:
    """`size` is the request's, in bytes."""
    if isinstance(model, PooledModel):
        return await pooled.infer(model, request, size, deadline)
    name, version = model.card.name, str(model.card.version)
    if isinstance(model, Translator):
        response = await model.translate(_translate_request(request), deadline)
        rows = [[_text_output(each) for each in found.hypotheses] for found in response.translations]
        return infer_response(request, name, version, rows)
    requests = _generate_requests(request)
    try:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(model.once(each, deadline)) for each in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    rows = [[_text_output(each) for each in call.result().generations] for call in calls]
    return infer_response(request, name, version, rows)


async def stream(
    model: Model, request: ParsedRequest, deadline: float | None
) -> AsyncGenerator[tuple[oip.ModelInferResponse, bool]]:
    """Each response, and if it is the last. Leave it through `contextlib.aclosing`."""
    assert not isinstance(model, PooledModel)  # it has no parameter `stream`
    name, version = model.card.name, str(model.card.version)
    texts = (
        _stream_translation(model, request, deadline)
        if isinstance(model, Translator)
        else _stream_generation(model, request, deadline)
    )
    async with aclosing(texts):
        async for index, text, last in texts:
            response = infer_response(request, name, version, [[text]])
            response.parameters["index"].int64_param = index
            yield response, last


async def _stream_translation(
    model: Translator, request: ParsedRequest, deadline: float | None
) -> AsyncGenerator[tuple[int, TextOutput, bool]]:
    unfinished = len(request.inputs)
    async with aclosing(model.stream(_translate_request(request), deadline)) as replies:
        async for reply in replies:
            finished = reply.HasField("translation")
            unfinished -= finished
            whole = _text_output(reply.translation.hypotheses[0]) if finished else TextOutput("")
            yield reply.input, TextOutput(reply.text, whole.score, whole.token_ids), not unfinished


async def _stream_generation(
    model: Generator, request: ParsedRequest, deadline: float | None
) -> AsyncGenerator[tuple[int, TextOutput, bool]]:
    requests = _generate_requests(request)
    if len(requests) > 1:
        raise InvalidRequest(f"a stream of a language model takes one prompt; the request has {len(requests)}")
    async with aclosing(model.stream(requests[0], deadline)) as replies:
        async for reply in replies:
            ids = tuple(token.id for token in reply.tokens)
            yield reply.index, TextOutput(reply.text, token_ids=ids), reply.HasField("usage")


def _translate_request(request: ParsedRequest) -> pb.TranslateRequest:
    options = pb.DecodingOptions()
    options.CopyFrom(request.parameters.options)
    options.return_scores = request.wants(SCORE)
    options.return_tokens = request.wants(TOKEN_IDS)
    return pb.TranslateRequest(inputs=request.inputs, options=options, **request.parameters.languages)


def _generate_requests(request: ParsedRequest) -> list[pb.GenerateRequest]:
    options = pb.GenerationOptions()
    options.CopyFrom(request.parameters.options)
    options.return_tokens = request.wants(TOKEN_IDS)
    options.return_log_probs = request.wants(SCORE) and not request.parameters.stream
    requests = []
    for item in request.inputs:
        generate = pb.GenerateRequest(options=options)
        if item.WhichOneof("kind") == "text":
            generate.text = item.text
        else:
            generate.token_ids.CopyFrom(item.token_ids)
        requests.append(generate)
    return requests


def _text_output(found: pb.Hypothesis | pb.Generation) -> TextOutput:
    score = found.score if found.HasField("score") else None
    return TextOutput(found.text, score, tuple(token.id for token in found.tokens))
