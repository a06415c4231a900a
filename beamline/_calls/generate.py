"""Generate and GenerateOnce, with a prompt or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from beamline._calls.answers import FINISH_REASONS, timings_of, token_of
from beamline._calls.operation import Operation, Stream
from beamline._calls.requests import Options, listed, rpc_of, set_fields, settings_of, template_of, unsendable
from beamline._calls.search_traces import step_of, trace_of
from beamline.errors import InvalidItem, InvalidRequest
from beamline.protos import beamline_pb2 as pb
from beamline.types import ChatMessages, Completion, Generation, GenerationPiece, Message, Prompt, TokenIds, Usage

_GENERATE = rpc_of("GenerateOnce", pb.GenerateRequest, pb.GenerateResponse)
_GENERATE_STREAM = rpc_of("Generate", pb.GenerateRequest, pb.GenerateReply)
_PROMPTS = "a string or TokenIds"


def generate(prompt: Prompt | Iterable[Prompt], options: Options) -> Operation[Generation]:
    single = isinstance(prompt, str | TokenIds)
    prompts: list[Any] = [prompt] if single else list(listed(prompt, "prompt", _PROMPTS))
    template = _generate_template("generate", options)
    items: list[Any] = []
    for index, each in enumerate(prompts):
        try:
            items.append(_prompted(template, each))
        except InvalidRequest as error:
            if single:
                raise
            items.append(InvalidItem(f"item {index}: {error}", index))
    return _generation(items, single, options)


def chat(messages: ChatMessages, options: Options) -> Operation[Generation]:
    return _generation([_chat_request(messages, options)], True, options)


def generate_stream(prompt: Prompt, options: Options) -> Stream[GenerationPiece]:
    request = _prompted(_generate_template("generate_stream", options), prompt)
    return Stream(_GENERATE_STREAM, settings_of(options), request, _generation_piece)


def chat_stream(messages: ChatMessages, options: Options) -> Stream[GenerationPiece]:
    return Stream(_GENERATE_STREAM, settings_of(options), _chat_request(messages, options), _generation_piece)


def _prompted(template: pb.GenerateRequest, prompt: Prompt) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(template)
    try:
        if isinstance(prompt, str):
            request.text = prompt
            return request
        if isinstance(prompt, TokenIds):
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt.ids))
            return request
    except (TypeError, ValueError) as error:
        raise unsendable(prompt) from error
    raise InvalidRequest(f"the prompt is of type {type(prompt).__name__}; give {_PROMPTS}")


def _chat_request(messages: ChatMessages, options: Options) -> pb.GenerateRequest:
    request = _generate_template("chat", options, ("add_generation_prompt",))
    given = [Message("user", messages)] if isinstance(messages, str) else list(listed(messages, "chat", "a Message"))
    for index, each in enumerate(given):
        try:
            if isinstance(each, Message):
                role, content = each.role, each.content
            else:
                role, content = each["role"], each["content"]
                if len(each) != 2:
                    raise KeyError("unknown keys")
            if role is None or content is None:  # protobuf would take it for one that was left out
                raise TypeError
            request.chat.messages.append(pb.ChatMessage(role=role, content=content))
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"message {index} of the chat must be a Message, or have the keys 'role' and 'content' with texts"
            ) from error
    request.chat.SetInParent()
    set_fields(request.chat, ("add_generation_prompt",), options)
    return request


def _generate_template(method: str, options: Options, also: Sequence[str] = ()) -> pb.GenerateRequest:
    known = [field.name for field in pb.GenerationOptions.DESCRIPTOR.fields]
    request = template_of(method, pb.GenerateRequest(), options, (), also=[*known, *also])
    set_fields(request.options, known, options)
    return request


def _generation(items: Sequence[Any], single: bool, options: Options) -> Operation[Generation]:
    def answers(response: pb.GenerateResponse) -> list[Generation]:
        return [
            Generation(
                tuple(
                    Completion(
                        each.text,
                        tuple(map(token_of, each.tokens)),
                        FINISH_REASONS.get(each.finish_reason),
                        each.score if each.HasField("score") else None,
                    )
                    for each in response.generations
                ),
                _usage(response.usage),
                timings_of(response.timings),
                response.model,
                response.version,
                trace_of(response.search_trace) if response.HasField("search_trace") else None,
            )
        ]

    return Operation(
        _GENERATE, settings_of(options), single, items, lambda call: items[call[0]], answers, items_per_call=1
    )


def _generation_piece(reply: pb.GenerateReply) -> GenerationPiece:
    return GenerationPiece(
        reply.index,
        reply.text,
        tuple(map(token_of, reply.tokens)),
        FINISH_REASONS.get(reply.finish_reason),
        _usage(reply.usage) if reply.HasField("usage") else None,
        tuple(map(step_of, reply.search_steps)),
        trace_of(reply.search_trace) if reply.HasField("search_trace") else None,
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.generated_tokens)
