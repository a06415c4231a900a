"""Writes the table of supported models into README.md, from the registry of families; `make docs` runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from beamline.converters.families import Family, families

PAGE = Path(__file__).parents[1] / "README.md"
_TABLE = re.compile(r"(<!-- supported models, by make docs -->\n).*?(<!-- end of supported models -->)", re.DOTALL)

_TRANSLATION, _LANGUAGE = "docs/converting-translation-models.md", "docs/converting-language-models.md"
_RECURRENT = "docs/converting-recurrent-models.md"
_MORE = {
    "own": "docs/own-model.md",
    "transformer": "examples/translation/README.md",
    "recurrent": _RECURRENT,
    "torch_transformer": "converters/families/torch_transformer.py",
    "torch_recurrent": _RECURRENT,
    "torch_recurrent_pooled": _RECURRENT,
    "recurrent_language": _RECURRENT,
    "marian": _TRANSLATION,
    "bart": _TRANSLATION,
    "m2m_100": _TRANSLATION,
    "t5": _TRANSLATION,
    "encoder-decoder": _TRANSLATION,
    "fairseq": _TRANSLATION,
    "opennmt_py": _TRANSLATION,
    "gpt2": _LANGUAGE,
    "llama": _LANGUAGE,
    "smollm3": _LANGUAGE,
    "olmo2": _LANGUAGE,
    "gemma": _LANGUAGE,
    "phi3": _LANGUAGE,
    "gpt_neox": _LANGUAGE,
    "opt": _LANGUAGE,
    "bloom": _LANGUAGE,
}


def table() -> str:
    return "\n".join(["| what | `model_type` or `family` | more |", "|---|---|---|", *map(_row, _ordered()), ""])


def _ordered() -> Iterator[type[Family]]:
    """Those that people download first; what is one's own behind them."""
    known = families()
    yield from (family for family in known if family.description.startswith("Hugging Face"))
    yield from (family for family in known if not family.description.startswith("Hugging Face"))


def _row(family: type[Family]) -> str:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    return f"| {family.description} | {types} | [details]({_MORE[family.family]}) |"


def page(text: str) -> str:
    return _TABLE.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
