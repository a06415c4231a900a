"""What the text side needs to know about a model: its tokenizers, and a few facts from its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from beamline.serving.contract.manifest import DecodingDefaults, Languages, Limits, Manifest, Vocabulary


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, /) -> list[int]:
        """As the encoder shall see it, the end token included where the model wants one."""
        ...

    def encode_batch(self, texts: Sequence[str], /) -> list[list[int]]: ...

    def encode_prefix(self, text: str, /) -> list[int]:
        """The beginning of a sequence that goes on: no end token."""
        ...

    def decode(self, ids: Sequence[int], /) -> str: ...

    def token(self, token_id: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The part of a manifest that a call is checked against. The fake model has one without any files."""

    name: str
    version: int
    vocabulary: Vocabulary
    limits: Limits
    defaults: DecodingDefaults
    feature_width: int = 0  # it reads vectors of so many values; 0: text
    source_languages: tuple[str, ...] = ()
    target_languages: tuple[str, ...] = ()
    languages: Languages | None = None  # where a request chooses them by tokens
    translates: bool = True  # it has a source; else it continues a prompt
    most_entries: int | None = None  # of the cache, for one request; None: as many as its limits can need
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # what the chat template may name


def card_of(manifest: Manifest) -> ModelCard:
    return ModelCard(
        name=manifest.name,
        version=manifest.version,
        vocabulary=manifest.vocabulary,
        limits=manifest.limits,
        defaults=manifest.defaults,
        feature_width=manifest.feature_width,
        source_languages=manifest.source_languages,
        target_languages=manifest.target_languages,
        languages=manifest.languages,
        translates=manifest.task == "translate",
        chat_template=manifest.chat_template,
        special_tokens=_special_tokens(manifest),
    )


def _special_tokens(manifest: Manifest) -> dict[str, str]:
    """Those that there are: to a template, a token that is missing is not an empty one."""
    tokens = {"bos_token": manifest.bos_token, "eos_token": manifest.eos_token, **manifest.special_tokens}
    return {name: token for name, token in tokens.items() if token}
