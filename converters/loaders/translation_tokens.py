"""Tokenizers of models that know several languages: which token names which, and where it stands.

The tokenizer that is served adds no language; a request says which one, and the server puts its token there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import langcodes
from langcodes.tag_parser import LanguageTagError

from beamline.converters.checkpoints.files import read_json
from beamline.converters.checkpoints.sentencepiece_files import ConvertedTokenizer, from_m2m100
from beamline.converters.checkpoints.tokenizers import ByteTokenizer, FastTokenizer, OriginalTokenizer
from beamline.converters.loaders.seq2seq import Text
from beamline.serving.contract.manifest import Language, Languages
from beamline.serving.errors import UnsupportedCheckpoint

# As NLLB and mBART write them.
_CODE = re.compile(r"[a-z]{2,3}_(?:[A-Z][a-z]{3}|[A-Z]{2})")


def bcp47(code: str) -> str:
    """The standard tag for what a checkpoint calls a language, or nothing: some of their names are no language's."""
    try:
        found = langcodes.Language.get(code.removesuffix("_XX"))
        return langcodes.standardize_tag(found.to_tag()) if found.is_valid() else ""
    except LanguageTagError:
        return ""


def listed(ids: Mapping[str, int]) -> tuple[Language, ...]:
    """By code. A tag that two of them would have is nobody's, and one that is another's code is only that one's."""
    tags = {code: bcp47(code) for code in ids}
    counts = [tag for code, tag in tags.items() if tag and (tag == code or tag not in ids)]
    return tuple(
        Language(code=code, id=index, bcp47=tags[code] if counts.count(tags[code]) == 1 else "")
        for code, index in sorted(ids.items())
    )


def multilingual_text(folder: Path, tokenizer: Any, generation: Mapping[str, Any]) -> Text:
    """mBART, M2M100 and NLLB: both sides have a token for their language."""
    ids: dict[str, int] = getattr(tokenizer, "lang_code_to_id", None) or {
        word: index for word, index in tokenizer.get_vocab().items() if _CODE.fullmatch(word)
    }
    if not ids:
        raise UnsupportedCheckpoint(str(folder), ["its tokenizer has no tokens for languages"])
    # The tokenizer itself shows where it puts its own language.
    shown = list(tokenizer("a")["input_ids"])
    source_place: Literal["before", "after"] = "before" if shown[0] in ids.values() else "after"
    target_place: Literal["forced", "start"] = "forced"
    chosen = generation.get("forced_bos_token_id")
    if source_place == "after" and type(tokenizer).__name__.startswith("MBart"):
        target_place, chosen = "start", generation.get("decoder_start_token_id")
    languages = listed(ids)
    by_id = {language.id: language.code for language in languages}
    converted: OriginalTokenizer
    if getattr(tokenizer, "spm_file", None):
        converted = _SlowTokenizer(from_m2m100(tokenizer), tokenizer, frozenset(by_id))
    else:
        converted = _FastTokenizer(tokenizer, frozenset(by_id))
    return Text(
        converted,
        Languages(
            source=languages,
            target=languages,
            source_place=source_place,
            target_place=target_place,
            default_source=_stated_source(folder, ids),
            default_target=by_id.get(chosen) if isinstance(chosen, int) else None,
        ),
    )


def text_with_target_tokens(tokenizer: Any, pattern: re.Pattern[str]) -> Text:
    """Models whose source begins with a token for the target's language, where there are such tokens."""
    found = {word: pattern.fullmatch(word) for word in tokenizer.get_vocab()}
    ids = {
        match[1]: tokenizer.convert_tokens_to_ids(word) for word, match in found.items() if match and bcp47(match[1])
    }
    kind = ByteTokenizer if type(tokenizer).__name__ == "ByT5Tokenizer" else FastTokenizer
    return Text(kind(tokenizer), target_in_source(ids))


def target_in_source(ids: Mapping[str, int]) -> Languages | None:
    return Languages(target=listed(ids), target_place="source") if ids else None


def _stated_source(folder: Path, ids: Mapping[str, int]) -> str | None:
    """What the checkpoint says itself; transformers would take English where nothing is said."""
    file = folder / "tokenizer_config.json"
    stated = read_json(file).get("src_lang") if file.is_file() else None
    return stated if stated in ids else None


class _FastTokenizer(FastTokenizer):
    """Without the language, which transformers puts into the tokenizer's last stage."""

    def __init__(self, original: Any, language_ids: frozenset[int]) -> None:
        super().__init__(original)
        self._language_ids = language_ids

    def save(self, path: Path) -> None:
        super().save(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        last = content["post_processor"]
        names = {name for name, each in last["special_tokens"].items() if set(each["ids"]) & self._language_ids}
        for template in ("single", "pair"):
            last[template] = [part for part in last[template] if part.get("SpecialToken", {}).get("id") not in names]
        last["special_tokens"] = {name: each for name, each in last["special_tokens"].items() if name not in names}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return _without_language(super().encode(text), self._language_ids)


class _SlowTokenizer(OriginalTokenizer):
    def __init__(self, converted: ConvertedTokenizer, original: Any, language_ids: frozenset[int]) -> None:
        self._converted, self._original, self._language_ids = converted, original, language_ids

    def save(self, path: Path) -> None:
        self._converted.save(path)

    def encode(self, text: str) -> list[int]:
        return _without_language(list(self._original(text)["input_ids"]), self._language_ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids, skip_special_tokens=True))


def _without_language(ids: list[int], languages: frozenset[int]) -> list[int]:
    """The one that stands before or behind a text."""
    return ids[1:] if ids[0] in languages else ids[:-1]
