from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_FALSE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_TRUE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TIME_LIMIT: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]

class SearchFate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEARCH_FATE_UNSPECIFIED: _ClassVar[SearchFate]
    SEARCH_FATE_LIVE: _ClassVar[SearchFate]
    SEARCH_FATE_PRUNED: _ClassVar[SearchFate]
    SEARCH_FATE_FINISHED: _ClassVar[SearchFate]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_MAX: _ClassVar[Pooling]
    POOLING_ATTENTION: _ClassVar[Pooling]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_FALSE: EarlyStopping
EARLY_STOPPING_TRUE: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TIME_LIMIT: FinishReason
FINISH_REASON_STOP: FinishReason
SEARCH_FATE_UNSPECIFIED: SearchFate
SEARCH_FATE_LIVE: SearchFate
SEARCH_FATE_PRUNED: SearchFate
SEARCH_FATE_FINISHED: SearchFate
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
POOLING_MAX: Pooling
POOLING_ATTENTION: Pooling

class Input(_message.Message):
    __slots__ = ("text", "token_ids", "features")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    features: Features
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("rows", "columns", "values")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class TranslateRequest(_message.Message):
    __slots__ = ("model", "version", "inputs", "source_language", "target_language", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    source_language: str
    target_language: str
    options: DecodingOptions
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., options: _Optional[_Union[DecodingOptions, _Mapping]] = ...) -> None: ...

class DecodingOptions(_message.Message):
    __slots__ = ("beam_size", "num_hypotheses", "length_penalty", "early_stopping", "min_length", "max_length", "no_repeat_ngram_size", "repetition_penalty", "target_prefix", "suppress_tokens", "time_limit_ms", "split_sentences", "return_scores", "return_tokens", "return_alignment", "return_search_trace", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    BEAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TARGET_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SENTENCES_FIELD_NUMBER: _ClassVar[int]
    RETURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    RETURN_SEARCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    beam_size: int
    num_hypotheses: int
    length_penalty: float
    early_stopping: EarlyStopping
    min_length: int
    max_length: int
    no_repeat_ngram_size: int
    repetition_penalty: float
    target_prefix: str
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    time_limit_ms: int
    split_sentences: bool
    return_scores: bool
    return_tokens: bool
    return_alignment: bool
    return_search_trace: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, beam_size: _Optional[int] = ..., num_hypotheses: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., min_length: _Optional[int] = ..., max_length: _Optional[int] = ..., no_repeat_ngram_size: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., target_prefix: _Optional[str] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., time_limit_ms: _Optional[int] = ..., split_sentences: _Optional[bool] = ..., return_scores: _Optional[bool] = ..., return_tokens: _Optional[bool] = ..., return_alignment: _Optional[bool] = ..., return_search_trace: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class TranslateResponse(_message.Message):
    __slots__ = ("model", "version", "translations")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSLATIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    translations: _containers.RepeatedCompositeFieldContainer[Translation]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., translations: _Optional[_Iterable[_Union[Translation, _Mapping]]] = ...) -> None: ...

class Translation(_message.Message):
    __slots__ = ("hypotheses", "source_tokens", "target_tokens", "timings", "source", "search_traces")
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEARCH_TRACES_FIELD_NUMBER: _ClassVar[int]
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    source_tokens: int
    target_tokens: int
    timings: Timings
    source: _containers.RepeatedCompositeFieldContainer[Token]
    search_traces: _containers.RepeatedCompositeFieldContainer[SearchTrace]
    def __init__(self, hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., source_tokens: _Optional[int] = ..., target_tokens: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., source: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., search_traces: _Optional[_Iterable[_Union[SearchTrace, _Mapping]]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("text", "score", "tokens", "token_log_probs", "alignment", "finish_reason")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    text: str
    score: float
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    token_log_probs: _containers.RepeatedScalarFieldContainer[float]
    alignment: _containers.RepeatedCompositeFieldContainer[AlignmentRow]
    finish_reason: FinishReason
    def __init__(self, text: _Optional[str] = ..., score: _Optional[float] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., token_log_probs: _Optional[_Iterable[float]] = ..., alignment: _Optional[_Iterable[_Union[AlignmentRow, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "piece")
    ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    id: int
    piece: str
    def __init__(self, id: _Optional[int] = ..., piece: _Optional[str] = ...) -> None: ...

class AlignmentRow(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, weights: _Optional[_Iterable[float]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "encode_ms", "decode_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    encode_ms: float
    decode_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., encode_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ...) -> None: ...

class TranslateReply(_message.Message):
    __slots__ = ("input", "text", "translation", "search_steps")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRANSLATION_FIELD_NUMBER: _ClassVar[int]
    SEARCH_STEPS_FIELD_NUMBER: _ClassVar[int]
    input: int
    text: str
    translation: Translation
    search_steps: _containers.RepeatedCompositeFieldContainer[SearchStep]
    def __init__(self, input: _Optional[int] = ..., text: _Optional[str] = ..., translation: _Optional[_Union[Translation, _Mapping]] = ..., search_steps: _Optional[_Iterable[_Union[SearchStep, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "version", "text", "token_ids", "chat", "options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    text: str
    token_ids: TokenIds
    chat: Chat
    options: GenerationOptions
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., options: _Optional[_Union[GenerationOptions, _Mapping]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerationOptions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "n", "beam_size", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "no_repeat_ngram_size", "suppress_tokens", "stop", "ignore_eos", "length_penalty", "early_stopping", "time_limit_ms", "echo", "return_tokens", "return_log_probs", "top_log_probs", "return_search_trace")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_SEARCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    n: int
    beam_size: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    no_repeat_ngram_size: int
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    length_penalty: float
    early_stopping: EarlyStopping
    time_limit_ms: int
    echo: bool
    return_tokens: bool
    return_log_probs: bool
    top_log_probs: int
    return_search_trace: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., n: _Optional[int] = ..., beam_size: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., no_repeat_ngram_size: _Optional[int] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., time_limit_ms: _Optional[int] = ..., echo: _Optional[bool] = ..., return_tokens: _Optional[bool] = ..., return_log_probs: _Optional[bool] = ..., top_log_probs: _Optional[int] = ..., return_search_trace: _Optional[bool] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("index", "text", "tokens", "finish_reason", "usage", "search_steps", "search_trace")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEARCH_STEPS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    finish_reason: FinishReason
    usage: Usage
    search_steps: _containers.RepeatedCompositeFieldContainer[SearchStep]
    search_trace: SearchTrace
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., search_steps: _Optional[_Iterable[_Union[SearchStep, _Mapping]]] = ..., search_trace: _Optional[_Union[SearchTrace, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("model", "version", "generations", "usage", "timings", "search_trace")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    usage: Usage
    timings: Timings
    search_trace: SearchTrace
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., search_trace: _Optional[_Union[SearchTrace, _Mapping]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("text", "tokens", "finish_reason", "score")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    finish_reason: FinishReason
    score: float
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., score: _Optional[float] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("id", "piece", "log_prob", "top", "from_prompt")
    ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    FROM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    id: int
    piece: str
    log_prob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    from_prompt: bool
    def __init__(self, id: _Optional[int] = ..., piece: _Optional[str] = ..., log_prob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ..., from_prompt: _Optional[bool] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("id", "piece", "log_prob")
    ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    piece: str
    log_prob: float
    def __init__(self, id: _Optional[int] = ..., piece: _Optional[str] = ..., log_prob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "generated_tokens", "model", "version")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    model: str
    version: str
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class SearchTrace(_message.Message):
    __slots__ = ("beam_size", "samples", "length_penalty", "steps", "hypotheses", "truncated")
    BEAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    beam_size: int
    samples: bool
    length_penalty: float
    steps: _containers.RepeatedCompositeFieldContainer[SearchStep]
    hypotheses: _containers.RepeatedCompositeFieldContainer[SearchEnd]
    truncated: bool
    def __init__(self, beam_size: _Optional[int] = ..., samples: _Optional[bool] = ..., length_penalty: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[SearchStep, _Mapping]]] = ..., hypotheses: _Optional[_Iterable[_Union[SearchEnd, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...

class SearchStep(_message.Message):
    __slots__ = ("number", "candidates", "forced", "part")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    number: int
    candidates: _containers.RepeatedCompositeFieldContainer[SearchCandidate]
    forced: bool
    part: int
    def __init__(self, number: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[SearchCandidate, _Mapping]]] = ..., forced: _Optional[bool] = ..., part: _Optional[int] = ...) -> None: ...

class SearchCandidate(_message.Message):
    __slots__ = ("id", "piece", "parent", "score", "normalized_score", "fate", "finish_reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_SCORE_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    piece: str
    parent: int
    score: float
    normalized_score: float
    fate: SearchFate
    finish_reason: FinishReason
    def __init__(self, id: _Optional[int] = ..., piece: _Optional[str] = ..., parent: _Optional[int] = ..., score: _Optional[float] = ..., normalized_score: _Optional[float] = ..., fate: _Optional[_Union[SearchFate, str]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class SearchEnd(_message.Message):
    __slots__ = ("step", "candidate")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    step: int
    candidate: int
    def __init__(self, step: _Optional[int] = ..., candidate: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "version", "sources", "texts", "source_language", "target_language")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    sources: _containers.RepeatedCompositeFieldContainer[Input]
    texts: _containers.RepeatedCompositeFieldContainer[Input]
    source_language: str
    target_language: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., texts: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("model", "version", "scores")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    scores: _containers.RepeatedCompositeFieldContainer[ScoredText]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[ScoredText, _Mapping]]] = ...) -> None: ...

class ScoredText(_message.Message):
    __slots__ = ("tokens", "log_prob", "perplexity", "scored_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    log_prob: float
    perplexity: float
    scored_tokens: int
    def __init__(self, tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., log_prob: _Optional[float] = ..., perplexity: _Optional[float] = ..., scored_tokens: _Optional[int] = ...) -> None: ...

class ClassifyRequest(_message.Message):
    __slots__ = ("model", "version", "inputs", "top_k", "truncate")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    top_k: int
    truncate: bool
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., top_k: _Optional[int] = ..., truncate: _Optional[bool] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("model", "version", "classifications")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLASSIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    classifications: _containers.RepeatedCompositeFieldContainer[Classification]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., classifications: _Optional[_Iterable[_Union[Classification, _Mapping]]] = ...) -> None: ...

class Classification(_message.Message):
    __slots__ = ("labels", "source_tokens", "timings")
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.RepeatedCompositeFieldContainer[Label]
    source_tokens: int
    timings: Timings
    def __init__(self, labels: _Optional[_Iterable[_Union[Label, _Mapping]]] = ..., source_tokens: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("name", "index", "probability")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    index: int
    probability: float
    def __init__(self, name: _Optional[str] = ..., index: _Optional[int] = ..., probability: _Optional[float] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "version", "inputs", "pooling", "normalize", "truncate")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    pooling: Pooling
    normalize: bool
    truncate: bool
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., normalize: _Optional[bool] = ..., truncate: _Optional[bool] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("model", "version", "embeddings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values", "source_tokens", "timings")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    source_tokens: int
    timings: Timings
    def __init__(self, values: _Optional[_Iterable[float]] = ..., source_tokens: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...
