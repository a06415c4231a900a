"""Between the public types and protobuf: a method's arguments become an operation, and its messages answers.

An operation is what a client has to do for one call of a method; how it is sent (from threads, from asyncio) is the
client's matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from google.protobuf.message import Message as ProtobufMessage

from beamline.errors import (
    BeamlineError,
    Forbidden,
    InvalidItem,
    InvalidRequest,
    ModelNotFound,
    Unauthenticated,
    Unimplemented,
)
from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.types import (
    ChatMessages,
    Classification,
    Completion,
    Embedding,
    Features,
    FinishReason,
    Generation,
    GenerationPiece,
    Hypothesis,
    Input,
    Label,
    Message,
    Model,
    Prompt,
    Score,
    SearchCandidate,
    SearchStep,
    SearchTrace,
    Timings,
    Token,
    TokenIds,
    TopToken,
    Translation,
    TranslationPiece,
    Usage,
)

SERVICE: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
REPOSITORY_INDEX = "/inference.GRPCInferenceService/RepositoryIndex"

_ITEMS_PER_CALL = 16  # enough to be sorted by length, few enough that a long text holds up few others
_BYTES_PER_CALL = 1 << 20
_SCORED_BYTES_PER_CALL = 8192  # a server scores up to 16,384 tokens in a call, and a byte is at most one token

_PRIORITY, _QUEUE_TIMEOUT = "x-beamline-priority", "x-beamline-queue-timeout-ms"
_CALL_OPTIONS = ("model", "version", "timeout", "priority", "queue_timeout")
_WHERE = re.compile(r"(inputs|texts|sources)\[(\d+)\](?:\.(?:text|token_ids|features))?")
# Where one of these is the answer, no other item of the list would have been answered either.
_FOR_ALL = (InvalidRequest, ModelNotFound, Unauthenticated, Forbidden, Unimplemented)

Answer = TypeVar("Answer")
Request = TypeVar("Request", bound=ProtobufMessage)
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method on the wire."""

    path: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _rpc(name: str, request: Any, response: Any) -> Rpc:
    return Rpc(f"/{SERVICE}/{name}", request.SerializeToString, response.FromString)


TRANSLATE = _rpc("Translate", pb.TranslateRequest, pb.TranslateResponse)
TRANSLATE_STREAM = _rpc("TranslateStream", pb.TranslateRequest, pb.TranslateReply)
GENERATE = _rpc("GenerateOnce", pb.GenerateRequest, pb.GenerateResponse)
GENERATE_STREAM = _rpc("Generate", pb.GenerateRequest, pb.GenerateReply)
SCORE = _rpc("Score", pb.ScoreRequest, pb.ScoreResponse)
CLASSIFY = _rpc("Classify", pb.ClassifyRequest, pb.ClassifyResponse)
EMBED = _rpc("Embed", pb.EmbedRequest, pb.EmbedResponse)
INDEX = Rpc(REPOSITORY_INDEX, oip.RepositoryIndexRequest.SerializeToString, oip.RepositoryIndexResponse.FromString)


@dataclass(frozen=True, slots=True)
class Settings:
    """What travels with each call of an operation."""

    timeout: float | None
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Operation(Generic[Answer]):
    rpc: Rpc
    settings: Settings
    single: bool  # one item was given, not a list
    items: Sequence[Any]  # messages, or an `InvalidItem` in the place of what can't be sent
    request: Callable[[Sequence[int]], Any]  # of the items with these indices
    answers: Callable[[Any], list[Answer]]  # of a response, in the order of its request
    items_per_call: int = _ITEMS_PER_CALL
    bytes_per_call: int = _BYTES_PER_CALL

    def calls(self) -> list[list[int]]:
        """The items of each call, by their indices. Items that can't be sent are in none."""
        calls: list[list[int]] = []
        size = 0
        for index, item in enumerate(self.items):
            if isinstance(item, InvalidItem):
                continue
            bytes_of_item = item.ByteSize()
            if not calls or len(calls[-1]) == self.items_per_call or size + bytes_of_item > self.bytes_per_call:
                calls.append([])
                size = 0
            calls[-1].append(index)
            size += bytes_of_item
        return calls

    def refused(self) -> dict[int, BeamlineError]:
        """The items that can't be sent."""
        return {index: item for index, item in enumerate(self.items) if isinstance(item, InvalidItem)}

    def failed(self, call: Sequence[int], error: BeamlineError, return_errors: bool) -> dict[int, BeamlineError]:
        """What a failed call means for its items; those that are not in it may be sent again. Raises what is not to be
        returned."""
        failure = self.named(call, error)
        if not return_errors or self.single:
            raise failure from error.__cause__
        if isinstance(failure, InvalidItem):
            return {failure.index: failure}
        if isinstance(failure, _FOR_ALL):
            raise failure from error.__cause__
        return dict.fromkeys(call, failure)

    def named(self, call: Sequence[int], error: BeamlineError) -> BeamlineError:
        """An item that a sentence names by its place in the call is named by its place in the list."""
        if not isinstance(error, InvalidRequest):
            return error
        sentence = str(error)
        found = _WHERE.match(sentence)
        if self.single:
            what = "the source" if found is not None and found[1] == "sources" else "the text"
            return error if found is None else InvalidRequest(f"{what}{sentence[found.end() :]}")
        if self.items_per_call == 1:  # each item has a call of its own
            return InvalidItem(f"item {call[0]}: {sentence}", call[0])
        if found is None or int(found[2]) >= len(call):
            return error
        index = call[int(found[2])]
        what = f"the source of item {index}" if found[1] == "sources" else f"item {index}"
        return InvalidItem(f"{what}{sentence[found.end() :]}", index)


@dataclass(frozen=True, slots=True)
class Stream(Generic[Answer]):
    rpc: Rpc
    settings: Settings
    request: Any
    piece: Callable[[Any], Answer]
    explained: Callable[[BeamlineError], BeamlineError] = lambda error: error


# -- the methods -----------------------------------------------------------------------------------------------------


def translate(text: Input | Iterable[Input], options: Options) -> Operation[Translation]:
    single, items = _items(text)
    template = _translate_template(options)

    def request(indices: Sequence[int]) -> pb.TranslateRequest:
        return _with(template, inputs=[items[index] for index in indices])

    def answers(response: pb.TranslateResponse) -> list[Translation]:
        return [_translation(each, response.model, response.version) for each in response.translations]

    return Operation(TRANSLATE, _settings(options), single, items, request, answers)


def translate_stream(text: Input | Iterable[Input], options: Options) -> Stream[TranslationPiece]:
    single, items = _items(text)
    for item in items:
        if isinstance(item, InvalidItem):
            raise item
    template = _translate_template(options)

    def piece(reply: pb.TranslateReply) -> TranslationPiece:
        whole = reply.HasField("translation")
        model, version = (
            str(options.get("model", "")),
            str(options.get("version", "")),
        )  # as asked for: a reply has none
        return TranslationPiece(
            reply.input,
            reply.text,
            _translation(reply.translation, model, version) if whole else None,
            tuple(map(_search_step, reply.search_steps)),
        )

    operation: Operation[Translation] = Operation(
        TRANSLATE_STREAM, _settings(options), single, items, lambda _: None, lambda _: []
    )

    def explained(error: BeamlineError) -> BeamlineError:
        return operation.named(range(len(items)), error)

    return Stream(TRANSLATE_STREAM, operation.settings, _with(template, inputs=items), piece, explained)


def generate(prompt: Prompt | Iterable[Prompt], options: Options) -> Operation[Generation]:
    single = isinstance(prompt, str | TokenIds)
    prompts: list[Any] = [prompt] if single else list(cast(Iterable[Prompt], prompt))
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
    return Stream(GENERATE_STREAM, _settings(options), request, _generation_piece)


def chat_stream(messages: ChatMessages, options: Options) -> Stream[GenerationPiece]:
    return Stream(GENERATE_STREAM, _settings(options), _chat_request(messages, options), _generation_piece)


def score(text: Input | Iterable[Input], source: Input | Iterable[Input] | None, options: Options) -> Operation[Score]:
    single, items = _items(text)
    template = _template("score", pb.ScoreRequest(), options, ())
    sources: list[Any] = []
    if source is not None:
        one, sources = _items(source)
        for index, item in enumerate(sources):
            if isinstance(item, InvalidItem):
                raise (
                    InvalidRequest("source is no text that can be sent")
                    if one
                    else InvalidItem(f"source of {item}", index)
                )
        if not one and len(sources) != len(items):
            raise InvalidRequest(
                f"there are {len(sources)} sources for {len(items)} texts; give one for all, or one for each"
            )
        if one:
            sources = sources * len(items)

    def request(indices: Sequence[int]) -> pb.ScoreRequest:
        texts = [items[index] for index in indices]
        return _with(template, texts=texts, sources=[sources[index] for index in indices] if sources else [])

    def answers(response: pb.ScoreResponse) -> list[Score]:
        return [
            Score(
                tuple(map(_token, each.tokens)),
                each.log_prob,
                each.perplexity,
                each.scored_tokens,
                response.model,
                response.version,
            )
            for each in response.scores
        ]

    return Operation(SCORE, _settings(options), single, items, request, answers, bytes_per_call=_SCORED_BYTES_PER_CALL)


def classify(text: Input | Iterable[Input], options: Options) -> Operation[Classification]:
    single, items = _items(text)
    template = _template("classify", pb.ClassifyRequest(), options, ("top_k", "truncate"))

    def request(indices: Sequence[int]) -> pb.ClassifyRequest:
        return _with(template, inputs=[items[index] for index in indices])

    def answers(response: pb.ClassifyResponse) -> list[Classification]:
        return [
            Classification(
                tuple(Label(label.name, label.index, label.probability) for label in each.labels),
                each.source_tokens,
                _timings(each.timings),
                response.model,
                response.version,
            )
            for each in response.classifications
        ]

    return Operation(CLASSIFY, _settings(options), single, items, request, answers)


def embed(text: Input | Iterable[Input], options: Options) -> Operation[Embedding]:
    single, items = _items(text)
    template = _template("embed", pb.EmbedRequest(), options, ("pooling", "normalize", "truncate"))

    def request(indices: Sequence[int]) -> pb.EmbedRequest:
        return _with(template, inputs=[items[index] for index in indices])

    def answers(response: pb.EmbedResponse) -> list[Embedding]:
        return [
            Embedding(tuple(each.values), each.source_tokens, _timings(each.timings), response.model, response.version)
            for each in response.embeddings
        ]

    return Operation(EMBED, _settings(options), single, items, request, answers)


def models(options: Options) -> Operation[list[Model]]:
    def answers(response: oip.RepositoryIndexResponse) -> list[list[Model]]:
        return [[Model(each.name, each.version, each.state, each.reason) for each in response.models]]

    item = oip.RepositoryIndexRequest()
    return Operation(INDEX, _settings(options), True, [item], lambda _: item, answers)


# -- requests --------------------------------------------------------------------------------------------------------


def _items(given: Input | Iterable[Input]) -> tuple[bool, list[Any]]:
    """If it was one item, and the items as messages."""
    if isinstance(given, str | TokenIds | Features):
        return True, [_input(given)]
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"the text is of type {type(given).__name__}; give {_INPUTS}, or a list of them")
    items: list[Any] = []
    for index, each in enumerate(given):
        try:
            items.append(_input(each))
        except InvalidRequest as error:
            items.append(InvalidItem(f"item {index}: {error}", index))
    return False, items


_INPUTS = "a string, TokenIds or Features"


def _input(item: Input) -> pb.Input:
    try:
        if isinstance(item, str):
            return pb.Input(text=item)
        if isinstance(item, TokenIds):
            return pb.Input(token_ids=pb.TokenIds(ids=item.ids))
        if isinstance(item, Features):
            return pb.Input(features=_features(item))
    except (TypeError, ValueError) as error:
        raise _unsendable(item) from error
    raise InvalidRequest(f"the text is of type {type(item).__name__}; give {_INPUTS}")


def _features(item: Features) -> pb.Features:
    widths = {len(row) for row in item.rows}
    if len(widths) != 1:
        raise InvalidRequest(
            f"the rows of features have lengths {sorted(widths)}; all must have the same, and one exist"
        )
    return pb.Features(
        rows=len(item.rows), columns=widths.pop(), values=[float(value) for row in item.rows for value in row]
    )


def _unsendable(item: object) -> InvalidRequest:
    if isinstance(item, str):
        return InvalidRequest("the text has lone surrogates, which no UTF-8 text has")
    if isinstance(item, TokenIds):
        return InvalidRequest("the ids must be whole numbers from 0 to 4294967295")
    return InvalidRequest("the features must be rows of numbers")


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
        raise _unsendable(prompt) from error
    raise InvalidRequest(f"the prompt is of type {type(prompt).__name__}; give a string or TokenIds")


def _chat_request(messages: ChatMessages, options: Options) -> pb.GenerateRequest:
    request = _generate_template("chat", options, ("add_generation_prompt",))
    given = [Message("user", messages)] if isinstance(messages, str) else list(messages)
    for index, each in enumerate(given):
        try:
            if isinstance(each, Message):
                role, content = each.role, each.content
            else:
                role, content = each["role"], each["content"]
                if len(each) != 2:
                    raise KeyError("unknown keys")
            request.chat.messages.append(pb.ChatMessage(role=role, content=content))
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"message {index} of the chat must be a Message, or have the keys 'role' and 'content' with texts"
            ) from error
    request.chat.SetInParent()
    if "add_generation_prompt" in options:
        _set(request.chat, "add_generation_prompt", options["add_generation_prompt"])
    return request


def _translate_template(options: Options) -> pb.TranslateRequest:
    known = [field.name for field in pb.DecodingOptions.DESCRIPTOR.fields]
    languages = ("source_language", "target_language")
    request = _template("translate", pb.TranslateRequest(), options, languages, also=known)
    for name in known:
        if name in options:
            _set(request.options, name, options[name])
    return request


def _generate_template(method: str, options: Options, also: Sequence[str] = ()) -> pb.GenerateRequest:
    known = [field.name for field in pb.GenerationOptions.DESCRIPTOR.fields]
    request = _template(method, pb.GenerateRequest(), options, (), also=[*known, *also])
    for name in known:
        if name in options:
            _set(request.options, name, options[name])
    return request


def _template(
    method: str, request: Request, options: Options, fields: Sequence[str], also: Sequence[str] = ()
) -> Request:
    """The request with everything but its items. `also`: options that are set elsewhere."""
    known = {*_CALL_OPTIONS, *fields, *also}
    for name in options:
        if name not in known:
            raise TypeError(
                f"{method}() got an unexpected keyword argument {name!r}; it knows {', '.join(sorted(known))}"
            )
    for name in ("model", *fields):
        if name in options:
            _set(request, name, options[name])
    version = options.get("version", "")
    _set(request, "version", str(version) if type(version) is int else version)
    return request


_ENUMS: dict[str, dict[Any, int]] = {
    "early_stopping": {
        False: pb.EARLY_STOPPING_FALSE,
        True: pb.EARLY_STOPPING_TRUE,
        "never": pb.EARLY_STOPPING_NEVER,
    },
    "pooling": {
        "last": pb.POOLING_LAST,
        "mean": pb.POOLING_MEAN,
        "max": pb.POOLING_MAX,
        "attention": pb.POOLING_ATTENTION,
    },
}


def _set(message: Any, name: str, value: Any) -> None:
    try:
        if name in _ENUMS:
            setattr(message, name, _ENUMS[name][value])
        elif name == "logit_bias":
            for token, bias in value.items():
                message.logit_bias[token] = bias
        elif name == "stop" or name == "suppress_tokens":
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"{name} is {value!r:.60}; it must be {_kind(message, name)}") from error


def _kind(message: Any, name: str) -> str:
    """What a field holds, for people."""
    if name in _ENUMS:
        return "one of " + ", ".join(repr(value) for value in _ENUMS[name])
    if name == "logit_bias":
        return "a mapping of token ids to numbers"
    if name == "stop":
        return "a text, or a list of texts"
    field = message.DESCRIPTOR.fields_by_name[name]
    kind = {
        field.TYPE_UINT32: "a whole number from 0 to 4294967295",
        field.TYPE_UINT64: "a whole number from 0 to 18446744073709551615",
        field.TYPE_FLOAT: "a number",
        field.TYPE_BOOL: "True or False",
        field.TYPE_STRING: "a text",
    }[field.type]
    return f"a list of token ids, each {kind}" if name == "suppress_tokens" else kind


def _with(template: Request, **fields: Sequence[Any]) -> Request:
    request = type(template)()
    request.CopyFrom(template)
    for name, values in fields.items():
        getattr(request, name).extend(values)
    return request


def _settings(options: Options) -> Settings:
    timeout = options.get("timeout")
    if timeout is not None:
        check_timeout(timeout)
    metadata: list[tuple[str, str]] = []
    if (priority := options.get("priority")) is not None:
        if type(priority) is not int or not 0 <= priority <= 3:
            raise InvalidRequest(f"priority is {priority!r:.60}; it must be a whole number from 0 (most urgent) to 3")
        metadata.append((_PRIORITY, str(priority)))
    if (seconds := options.get("queue_timeout")) is not None:
        if not isinstance(seconds, int | float) or not 0 < seconds <= 24 * 3600:
            raise InvalidRequest(
                f"queue_timeout is {seconds!r:.60}; it must be seconds, more than 0 and at most a day's"
            )
        metadata.append((_QUEUE_TIMEOUT, str(max(1, round(1000 * seconds)))))
    return Settings(timeout, tuple(metadata))


def check_timeout(timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise InvalidRequest(f"timeout is {timeout!r:.60}; it must be seconds, more than 0, or None for no limit")


# -- answers ---------------------------------------------------------------------------------------------------------

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_EOS: "eos",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
    pb.FINISH_REASON_STOP: "stop",
}


def _generation(items: Sequence[Any], single: bool, options: Options) -> Operation[Generation]:
    def answers(response: pb.GenerateResponse) -> list[Generation]:
        return [
            Generation(
                tuple(
                    Completion(
                        each.text,
                        tuple(map(_token, each.tokens)),
                        _FINISH_REASONS.get(each.finish_reason),
                        each.score if each.HasField("score") else None,
                    )
                    for each in response.generations
                ),
                _usage(response.usage),
                _timings(response.timings),
                response.model,
                response.version,
                _search_trace(response.search_trace) if response.HasField("search_trace") else None,
            )
        ]

    return Operation(
        GENERATE, _settings(options), single, items, lambda call: items[call[0]], answers, items_per_call=1
    )


def _generation_piece(reply: pb.GenerateReply) -> GenerationPiece:
    return GenerationPiece(
        reply.index,
        reply.text,
        tuple(map(_token, reply.tokens)),
        _FINISH_REASONS.get(reply.finish_reason),
        _usage(reply.usage) if reply.HasField("usage") else None,
        tuple(map(_search_step, reply.search_steps)),
        _search_trace(reply.search_trace) if reply.HasField("search_trace") else None,
    )


def _translation(message: pb.Translation, model: str, version: str) -> Translation:
    return Translation(
        tuple(map(_hypothesis, message.hypotheses)),
        message.source_tokens,
        message.target_tokens,
        _timings(message.timings),
        model,
        version,
        tuple(Token(token.id, token.piece) for token in message.source),
        tuple(map(_search_trace, message.search_traces)),
    )


_FATES: dict[int, Literal["live", "pruned", "finished"]] = {
    pb.SEARCH_FATE_LIVE: "live",
    pb.SEARCH_FATE_PRUNED: "pruned",
    pb.SEARCH_FATE_FINISHED: "finished",
}


def _search_trace(message: pb.SearchTrace) -> SearchTrace:
    return SearchTrace(
        message.beam_size,
        message.samples,
        message.length_penalty,
        tuple(map(_search_step, message.steps)),
        tuple((end.step, end.candidate) for end in message.hypotheses),
        message.truncated,
    )


def _search_step(message: pb.SearchStep) -> SearchStep:
    candidates = tuple(
        SearchCandidate(
            each.id if each.HasField("id") else None,
            each.piece,
            each.parent,
            each.score,
            each.normalized_score,
            _FATES[each.fate],
            _FINISH_REASONS.get(each.finish_reason),
        )
        for each in message.candidates
    )
    return SearchStep(message.number, candidates, message.forced, message.part)


def _hypothesis(message: pb.Hypothesis) -> Hypothesis:
    return Hypothesis(
        message.text,
        message.score if message.HasField("score") else None,
        tuple(Token(token.id, token.piece) for token in message.tokens),
        tuple(message.token_log_probs),
        tuple(tuple(row.weights) for row in message.alignment),
        _FINISH_REASONS.get(message.finish_reason),
    )


def _token(message: pb.GeneratedToken) -> Token:
    return Token(
        message.id,
        message.piece,
        message.log_prob if message.HasField("log_prob") else None,
        tuple(TopToken(top.id, top.piece, top.log_prob) for top in message.top),
        message.from_prompt,
    )


def _timings(message: pb.Timings) -> Timings:
    return Timings(message.queue_ms, message.encode_ms, message.decode_ms)


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.generated_tokens)
