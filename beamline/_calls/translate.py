"""Translate and TranslateStream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from beamline._calls.answers import FINISH_REASONS, timings_of
from beamline._calls.operation import Operation, Stream
from beamline._calls.requests import (
    LANGUAGES,
    Options,
    items_of,
    rpc_of,
    set_fields,
    settings_of,
    template_of,
    with_items,
)
from beamline._calls.search_traces import step_of, trace_of
from beamline.errors import BeamlineError, InvalidItem
from beamline.protos import beamline_pb2 as pb
from beamline.types import Hypothesis, Input, Token, Translation, TranslationPiece

_TRANSLATE = rpc_of("Translate", pb.TranslateRequest, pb.TranslateResponse)
_TRANSLATE_STREAM = rpc_of("TranslateStream", pb.TranslateRequest, pb.TranslateReply)


def translate(text: Input | Iterable[Input], options: Options) -> Operation[Translation]:
    single, items = items_of(text)
    template = _translate_template(options)

    def request(indices: Sequence[int]) -> pb.TranslateRequest:
        return with_items(template, inputs=[items[index] for index in indices])

    def answers(response: pb.TranslateResponse) -> list[Translation]:
        return [_translation(each, response.model, response.version) for each in response.translations]

    return Operation(_TRANSLATE, settings_of(options), single, items, request, answers)


def translate_stream(text: Input | Iterable[Input], options: Options) -> Stream[TranslationPiece]:
    single, items = items_of(text)
    for item in items:
        if isinstance(item, InvalidItem):
            raise item
    template = _translate_template(options)

    def piece(reply: pb.TranslateReply) -> TranslationPiece:
        whole = reply.HasField("translation")
        model, version = (
            str(options.get("model") or ""),
            str(options.get("version") or ""),
        )  # as asked for: a reply has none
        return TranslationPiece(
            reply.input,
            reply.text,
            _translation(reply.translation, model, version) if whole else None,
            tuple(map(step_of, reply.search_steps)),
        )

    operation: Operation[Translation] = Operation(
        _TRANSLATE_STREAM, settings_of(options), single, items, lambda _: None, lambda _: []
    )

    def explained(error: BeamlineError) -> BeamlineError:
        return operation.named(range(len(items)), error)

    return Stream(_TRANSLATE_STREAM, operation.settings, with_items(template, inputs=items), piece, explained)


def _translate_template(options: Options) -> pb.TranslateRequest:
    known = [field.name for field in pb.DecodingOptions.DESCRIPTOR.fields]
    request = template_of("translate", pb.TranslateRequest(), options, LANGUAGES, also=known)
    set_fields(request.options, known, options)
    return request


def _translation(message: pb.Translation, model: str, version: str) -> Translation:
    return Translation(
        tuple(map(_hypothesis, message.hypotheses)),
        message.source_tokens,
        message.target_tokens,
        timings_of(message.timings),
        model,
        version,
        tuple(Token(token.id, token.piece) for token in message.source),
        tuple(map(trace_of, message.search_traces)),
    )


def _hypothesis(message: pb.Hypothesis) -> Hypothesis:
    return Hypothesis(
        message.text,
        message.score if message.HasField("score") else None,
        tuple(Token(token.id, token.piece) for token in message.tokens),
        tuple(message.token_log_probs),
        tuple(tuple(row.weights) for row in message.alignment),
        FINISH_REASONS.get(message.finish_reason),
    )
