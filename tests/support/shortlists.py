"""Lexical tables for the small models of the tests."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.backends.shortlist import Shortlist
from beamline.serving.contract.manifest import File
from beamline.serving.contract.shortlist import Lexicon
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from tests.support.marian_shape import EOS, VOCABULARY, MarianShape

Translations = Mapping[int, Sequence[int]]


def lexicon(always: Sequence[int], translations: Translations, words: int = VOCABULARY) -> Lexicon:
    lists = [sorted(translations.get(word, ())) for word in range(words)]
    return Lexicon(
        ("", ""),
        np.array(always, np.int32),
        np.cumsum([0, *map(len, lists)], dtype=np.int64),
        np.array([each for one in lists for each in one], np.int32),
    )


def random_translations(seed: int, each: int) -> Translations:
    chance = random.Random(seed)
    return {word: chance.sample(range(VOCABULARY), each) for word in range(VOCABULARY)}


ALL = lexicon(range(VOCABULARY), {})
EVERYWHERE = (EOS, 2, 3, 20)
FEW = random_translations(seed=0, each=4)


def with_lexicon(model: MarianShape, folder: Path, table: Lexicon) -> MarianShape:
    """The same model with this table, in another folder: the version itself is shared with other tests."""
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    with (folder / "shortlist.npz").open("wb") as written:
        table.save(written)
    named = File(file="shortlist.npz", sha256="")
    return replace(model, folder=folder, manifest=model.manifest.model_copy(update={"shortlist": named}))


def shortlisted_engine(model: MarianShape, slots: int = 16) -> tuple[Engine, Shortlist]:
    backend = CpuBackend(model.folder, model.manifest, threads=1, shortlist=True)
    engine = Engine(model.manifest, backend, Plan.of(model.manifest, slots), max_queue=10_000)
    shortlist = backend._shortlist
    assert shortlist is not None
    return engine, shortlist
