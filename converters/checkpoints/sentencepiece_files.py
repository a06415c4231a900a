"""sentencepiece models and Marian directories -> the JSON file from which the server tokenizes.

The file holds the sentencepiece model itself and what is put around it (`SentencePieceSpec`), so
ids and text are the original's. Hugging Face's MarianTokenizer, unlike sentencepiece, reads
"</s>", "<unk>" and "<pad>" in a text as its own tokens; so does its conversion.
"""

from __future__ import annotations

import base64
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from beamline.serving.errors import UnsupportedCheckpoint
from beamline.serving.text.tokenizer import MarianSpec, SentencePieceSpec


@dataclass(frozen=True)
class ConvertedTokenizer:
    spec: SentencePieceSpec

    def to_json(self) -> dict[str, Any]:
        return {"beamline": self.spec.model_dump(exclude_defaults=True)}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), ensure_ascii=False) + "\n", encoding="utf-8")


def from_sentencepiece(path: str | Path, *, add_eos: bool, add_bos: bool = False) -> ConvertedTokenizer:
    """A model whose ids are sentencepiece's own."""
    model, encoded = _read(Path(path))
    bos, eos = model.bos_id(), model.eos_id()
    reasons = ["it has no beginning of sentence"] if add_bos and bos < 0 else []
    reasons += ["it has no end of sentence"] if add_eos and eos < 0 else []
    if reasons:
        raise UnsupportedCheckpoint(str(path), reasons)
    return ConvertedTokenizer(
        SentencePieceSpec(sentencepiece=encoded, prefix=(bos,) if add_bos else (), suffix=(eos,) if add_eos else ())
    )


def marian_original(directory: Path) -> Any:
    """Hugging Face's own tokenizer: only it knows which of its files, in which version, declare a token special."""
    from transformers import MarianTokenizer  # it takes seconds to import, and other families don't need it

    with warnings.catch_warnings():
        # sacremoses normalises punctuation only where somebody calls `normalize`, which encoding does not.
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return MarianTokenizer.from_pretrained(directory, local_files_only=True)


def from_marian(directory: str | Path) -> tuple[ConvertedTokenizer, ConvertedTokenizer]:
    """(source, target) of a Hugging Face Marian directory."""
    directory = Path(directory)
    _, source_model = _read(directory / "source.spm")
    _, target_model = _read(directory / "target.spm")
    original = marian_original(directory)
    reasons = [
        f"its token {token.content!r} takes its surroundings with it (lstrip, rstrip, single_word)"
        for token in original.added_tokens_decoder.values()
        if token.lstrip or token.rstrip or token.single_word
    ]
    if reasons:
        raise UnsupportedCheckpoint(str(directory), reasons)

    def side(model: str, vocabulary: dict[str, int], decoding: str | None) -> ConvertedTokenizer:
        marian = MarianSpec(
            vocabulary=vocabulary,
            unknown=vocabulary[original.unk_token],
            added=original.added_tokens_encoder,
            hidden=tuple(original.all_special_ids),
            decoding=decoding,
            clean_up_spaces=bool(original.clean_up_tokenization_spaces),
        )
        return ConvertedTokenizer(
            SentencePieceSpec(sentencepiece=model, suffix=(original.eos_token_id,), marian=marian)
        )

    source = side(source_model, original.encoder, None)
    if original.separate_vocabs:
        return source, side(target_model, original.target_encoder, None)
    # Hugging Face decodes a shared vocabulary by the *source* model, unless it is told otherwise.
    return source, side(target_model, original.encoder, source_model)


def from_m2m100(original: Any) -> ConvertedTokenizer:
    """A tokenizer of Hugging Face's M2M100, without a language: a request says which."""
    _, model = _read(Path(original.spm_file))
    return ConvertedTokenizer(
        SentencePieceSpec(
            sentencepiece=model,
            suffix=(original.eos_token_id,),
            marian=MarianSpec(
                vocabulary={**original.encoder, **original.lang_token_to_id},
                unknown=original.unk_token_id,
                added=original.added_tokens_encoder,
                # Languages are no part of a text, whether or not this directory calls them special.
                hidden=tuple(sorted({*original.all_special_ids, *original.lang_token_to_id.values()})),
                clean_up_spaces=bool(original.clean_up_tokenization_spaces),
                reads_language_codes=False,
            ),
        )
    )


def from_word_list(path: Path, marian: MarianSpec, suffix: tuple[int, ...]) -> ConvertedTokenizer:
    """A model whose pieces have the ids of a list of words, such as fairseq's dictionary."""
    _, model = _read(path)
    return ConvertedTokenizer(SentencePieceSpec(sentencepiece=model, suffix=suffix, marian=marian))


def _read(path: Path) -> tuple[SentencePieceProcessor, str]:
    """The model, and its file in base64."""
    content = path.read_bytes()
    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, IndexError) as error:  # what the library makes of a C++ status
        raise UnsupportedCheckpoint(str(path), [f"it is no sentencepiece model: {error}"]) from error
    return model, base64.b64encode(content).decode()
