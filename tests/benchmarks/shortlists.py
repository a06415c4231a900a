"""The same models with a vocabulary shortlist, for us and for CTranslate2 (`vmap`): both compute the same rows.

The table is random, but has the overlap of a real one: nine tenths of a word's translations are common to many words.
A sentence then needs about 1,600 words, and eight of them together about 4,000.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np

from beamline.serving.contract.manifest import MANIFEST_FILE, File, read_manifest
from beamline.serving.contract.shortlist import Lexicon
from tests.benchmarks import shape
from tests.benchmarks.made import hash_of, once

_BEST = 100  # translations of a source word
_COMMON = 2_000  # words that most translations are taken from
_RARE = 10  # of a word's translations, those that are not
_SENTENCES = 32  # the largest batch


def for_beamline(cache: Path, exported: Path) -> Path:
    def make(folder: Path) -> None:
        _link(exported, folder)
        manifest = read_manifest(folder)
        table, size = _translations(), manifest.vocabulary.source_size
        files = manifest.tokenizers
        lexicon = Lexicon(
            (files.source.sha256, files.target.sha256),
            np.zeros(0, np.int32),
            np.cumsum([0, *(len(table.get(word, ())) for word in range(size))], dtype=np.int64),
            np.array([each for word in sorted(table) for each in table[word]], np.int32),
        )
        with (folder / "shortlist.npz").open("wb") as file:
            lexicon.save(file)
        changed = manifest.model_copy(update={"shortlist": File(file="shortlist.npz", sha256="")})
        (folder / MANIFEST_FILE).unlink()  # a link
        (folder / MANIFEST_FILE).write_text(changed.to_json())

    kind, _, made_from = exported.name.rpartition("-")
    return once(cache / f"{kind}_shortlist-{made_from}{hash_of(Path(__file__))}", make)


def for_ctranslate2(cache: Path, model: Path) -> Path:
    """With a file vmap.txt: a source word, a tab, and its translations."""

    def make(folder: Path) -> None:
        _link(model, folder)
        lines = (f"t{word}\t{' '.join(f't{each}' for each in best)}\n" for word, best in _translations().items())
        (folder / "vmap.txt").write_text("".join(lines))

    made_from = model.parent.name.rpartition("-")[2]
    return once(cache / f"ctranslate2_vmap-{made_from}{hash_of(Path(__file__))}", make)


def _translations() -> dict[int, list[int]]:
    """Of the source words that are measured, in their order."""
    rng = random.Random(0)
    words = range(2, shape.PAD)
    common = rng.sample(words, _COMMON)
    found = sorted({word for sentence in shape.sentences(_SENTENCES) for word in sentence})
    return {word: [*rng.sample(common, _BEST - _RARE), *rng.sample(words, _RARE)] for word in found}


def _link(source: Path, target: Path) -> None:
    """The weights are large, and nobody changes them."""
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=os.link)
