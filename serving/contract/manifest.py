"""The contract between a converter and the server: `manifest.json` of one model version.

The engine knows only what stands here: graphs, tensors and their kinds, ids, limits and decoding
defaults. It never learns what architecture it serves.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from beamline.serving.contract.files import read_text
from beamline.serving.contract.validation import sentence_of
from beamline.serving.errors import ManifestError

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
# In the metadata of a graph with 8-bit weights: what two neighbouring weights of a channel add up to at most.
LARGEST_PAIR = "beamline.largest_pair"
# In the same metadata, as JSON: by an activation's name, the scale and the zero by which 8 bits hold it, on any text.
FIXED_SCALES = "beamline.fixed_scales"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

Id = Annotated[int, Field(ge=0)]
Precision = Literal["float32", "float16", "bfloat16", "int8", "int4"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StateKind(StrEnum):
    CACHE = "cache"  # [B, H, C, D]: appended to at every step, shared by the beams of a request
    RECURRENT = "recurrent"  # [B, K, ...]: one per beam, gathered by parent inside the graph
    MEMORY = "memory"  # [B, ...]: fixed while a request runs; the encoder's output


class StateTensor(Record):
    """One tensor that lives in a slot. Symbolic axes: B requests, K beams, C cache, S source positions."""

    name: str
    kind: StateKind
    dtype: Literal["float32", "float16", "bfloat16", "bool", "int64"]
    shape: tuple[Literal["B", "K", "C", "S"] | int, ...]

    @property
    def output(self) -> str:
        """The step graph's name for this tensor's next value."""
        return f"next_{self.name}"


class File(Record):
    """A file of the version, and what must be in it."""

    file: str
    sha256: str


class Graphs(Record):
    step: File
    score: File
    encoder: File | None = None  # none for a decoder-only model
    prefill: File | None = None  # takes in a prompt by the chunk; decoder-only Transformers have one


class Weights(File):
    bytes: int


class Tokenizers(Record):
    """The same file where source and target share a vocabulary."""

    source: File
    target: File


class Vocabulary(Record):
    source_size: int
    target_size: int
    pad_id: Id
    eos_ids: tuple[Id, ...] = Field(min_length=1)
    decoder_start_id: Id | None = None  # of a decoder-only model: what stands before an empty prompt, where it has one

    @property
    def start_id(self) -> int:
        """Where there must be one: in every encoder-decoder model."""
        assert self.decoder_start_id is not None
        return self.decoder_start_id


class Language(Record):
    """One that a request may name, and its token."""

    code: str  # as the checkpoint writes it
    id: Id
    bcp47: str = ""  # the standard tag, where it has one that is no other's


class Languages(Record):
    """Of a model that knows several: which tokens name them, and where these stand."""

    source: tuple[Language, ...] = ()  # none: the source's language needs no token
    target: tuple[Language, ...] = ()
    source_place: Literal["before", "after"] = "before"  # the source's tokens, its end token included
    # The first token that is produced, the one before it, or the first of the source.
    target_place: Literal["forced", "start", "source"] = "forced"
    default_source: str | None = None  # codes, for requests that name none
    default_target: str | None = None


class Limits(Record):
    """Tokens. Of a decoder-only model, the source is the prompt, and the target the prompt and the answer together."""

    max_source_length: int = Field(ge=1)  # the end token included
    max_target_length: int = Field(ge=2)  # the start and end tokens included
    max_beam_size: int = Field(ge=1)


class DecodingDefaults(Record):
    """What a request gets where it says nothing: a checkpoint's generation_config.json."""

    beam_size: int = Field(default=4, ge=1)
    num_hypotheses: int = Field(default=1, ge=1)
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_length: int = Field(default=0, ge=0)
    max_length: int = Field(default=256, ge=2)
    # Where a request names no max_length, a translation has at most so many tokens per token of its source, and so many
    # more: a model that repeats itself is cut off in time. 0: max_length alone decides.
    max_length_factor: float = Field(default=0.0, ge=0)
    max_length_extra: int = Field(default=0, ge=0)
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    bad_words: tuple[tuple[Id, ...], ...] = ()
    suppress_tokens: tuple[Id, ...] = ()
    forced_bos_id: Id | None = None
    forced_eos_id: Id | None = None  # produced at the length limit, whatever the model says
    stop: tuple[str, ...] = ()  # strings before which an answer ends
    # Of decoder-only models; max_length counts the prompt, this only what is generated. None: up to the limit.
    max_new_tokens: int | None = Field(default=None, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy or beam search, no sampling
    top_k: int = Field(default=0, ge=0)  # 0: off
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)


class Manifest(Record):
    format_version: Literal[1] = 1
    name: str = Field(pattern=NAME)
    version: int = Field(ge=1)
    task: Literal["translate", "generate"] = "translate"
    family: str  # for people; nothing depends on it
    precision: Precision = "float32"  # of the stored weights
    graphs: Graphs
    weights: Weights
    tokenizers: Tokenizers
    shortlist: File | None = None  # which words a source may need, where somebody made such a table
    state: tuple[StateTensor, ...]
    vocabulary: Vocabulary
    limits: Limits
    feature_width: int = Field(default=0, ge=0)  # the encoder reads vectors of so many values; 0: token ids
    defaults: DecodingDefaults
    forbidden_in_graph: tuple[Id, ...] = ()  # words that the step graph never produces; no rule is needed for them
    source_languages: tuple[str, ...] = ()
    target_languages: tuple[str, ...] = ()
    languages: Languages | None = None  # where a request chooses them by tokens
    chat_template: str | None = None  # Jinja, as Hugging Face tokenizers have it
    bos_token: str = ""  # what the chat template may name
    eos_token: str = ""
    special_tokens: dict[str, str] = Field(default_factory=dict)  # the others that it may name: pad_token, unk_token
    description: str = ""
    created_with: dict[str, str] = Field(default_factory=dict)  # versions of what converted it

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        vocabulary, defaults = self.vocabulary, self.defaults
        ids = [vocabulary.pad_id, *vocabulary.eos_ids, *defaults.suppress_tokens]
        ids += [i for word in defaults.bad_words for i in word]
        single = (vocabulary.decoder_start_id, defaults.forced_bos_id, defaults.forced_eos_id)
        ids += [i for i in single if i is not None]
        if self.languages is not None:
            ids += [language.id for language in (*self.languages.source, *self.languages.target)]
        outside = sorted({i for i in ids if i >= vocabulary.target_size})
        if outside:
            raise ValueError(f"ids {outside} are outside the vocabulary of {vocabulary.target_size}")
        if defaults.max_length > self.limits.max_target_length:
            raise ValueError(
                f"defaults.max_length {defaults.max_length} is above "
                f"limits.max_target_length {self.limits.max_target_length}"
            )
        if defaults.beam_size > self.limits.max_beam_size:
            raise ValueError("defaults.beam_size is above limits.max_beam_size")
        if len({tensor.name for tensor in self.state}) != len(self.state):
            raise ValueError("two state tensors have the same name")
        if self.task == "translate" and (self.graphs.encoder is None or vocabulary.decoder_start_id is None):
            raise ValueError("a model that translates needs graphs.encoder and vocabulary.decoder_start_id")
        if self.task == "generate" and self.graphs.encoder is not None:
            raise ValueError("a model that generates has no graphs.encoder")
        return self

    @property
    def candidates_per_beam(self) -> int:
        """Enough that a beam's worth of candidates does not end, however many end tokens there are."""
        return max(2, 1 + len(self.vocabulary.eos_ids))

    def tensors(self, kind: StateKind) -> list[StateTensor]:
        return [tensor for tensor in self.state if tensor.kind is kind]

    @property
    def files(self) -> list[File]:
        """Every file that the version must have, each once."""
        graphs = [file for _, file in self.graphs if file is not None]
        shortlist = [] if self.shortlist is None else [self.shortlist]
        return [*graphs, self.weights, self.tokenizers.source, self.tokenizers.target, *shortlist]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


class PooledManifest(Record):
    """A model that reads a text once and says what it is: labels, a vector, or both. Its one graph takes `source` and
    `source_mask`, and returns `probabilities` [B, labels] where there are labels, and of each pooling
    `vector_<pooling>` [B, width]."""

    format_version: Literal[1] = 1
    name: str = Field(pattern=NAME)
    version: int = Field(ge=1)
    task: Literal["classify", "embed"]  # a model that classifies embeds as well
    family: str  # for people; nothing depends on it
    graph: File
    weights: Weights
    tokenizer: File
    vocabulary_size: int = Field(ge=1)
    pad_id: Id
    max_source_length: int = Field(ge=1)  # tokens, the end token included
    labels: tuple[str, ...] = ()
    multi_label: bool = False  # each label has a probability of its own, or all of them share one
    poolings: tuple[Literal["last", "mean", "max", "attention"], ...] = Field(min_length=1)  # the first is the default
    width: int = Field(ge=1)  # of a vector
    normalize: bool = False  # vectors have length one unless a request says otherwise
    description: str = ""
    created_with: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> PooledManifest:
        if (self.task == "classify") != bool(self.labels):
            raise ValueError("a model that classifies has labels, and one that only embeds has none")
        for field in ("labels", "poolings"):
            if len(set(getattr(self, field))) != len(getattr(self, field)):
                raise ValueError(f"{field} has one of them twice")
        if self.pad_id >= self.vocabulary_size:
            raise ValueError(f"pad_id {self.pad_id} is outside the vocabulary of {self.vocabulary_size}")
        return self

    @property
    def files(self) -> list[File]:
        return [self.graph, self.weights, self.tokenizer]

    @property
    def graphs(self) -> tuple[tuple[str, File | None], ...]:
        """By name, as `Manifest.graphs` gives them."""
        return (("pooled", self.graph),)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


AnyManifest = Manifest | PooledManifest


def read_manifest(folder: Path) -> Manifest:
    """As `read_any_manifest`, of a model that writes."""
    manifest = read_any_manifest(folder)
    if not isinstance(manifest, Manifest):
        raise ManifestError(f"{folder / MANIFEST_FILE} is of a model that can only {manifest.task}")
    return manifest


def read_any_manifest(folder: Path) -> AnyManifest:
    """The manifest of a version folder, or a `ManifestError` that names the file and what is wrong in it."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ManifestError(f"{path} is not JSON: {error}") from error
    found = content.get("format_version") if isinstance(content, dict) else None
    if found != FORMAT_VERSION:
        raise ManifestError(
            f"{path} has format version {found!r}; this server reads version {FORMAT_VERSION}: convert the model again"
        )
    kind = PooledManifest if content.get("task") in ("classify", "embed") else Manifest
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ManifestError(f"{path} is not a valid manifest: {sentence_of(error, 'the manifest')}") from error
