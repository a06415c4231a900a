"""From parallel text to the lexical table of a model version, in its vocabulary."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beamline.converters.shortlist.alignment import LONGEST, Ints, Sentences, learn
from beamline.converters.version.atomic_write import write_whole
from beamline.serving.contract.manifest import MANIFEST_FILE, File, Manifest
from beamline.serving.contract.shortlist import Lexicon
from beamline.serving.errors import ConversionError
from beamline.serving.text.tokenizer import TextTokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # what sentencepiece spells unknown characters with
_BATCH = 10_000  # lines that are tokenised at once


@dataclass(frozen=True)
class Wanted:
    best: int = 100  # target words for each source word
    frequent: int = 100  # target words that are always there
    rounds: int = 5  # of expectation maximisation
    least: float = 1e-4  # a translation that is less likely is noise


@dataclass(frozen=True)
class Pairs:
    """Tokenised text; both sides have as many sentences."""

    source: list[list[int]]
    target: list[list[int]]


def tokenised(
    folder: Path, manifest: Manifest, source: Sequence[str], target: Sequence[str], advance: Callable[[int], None]
) -> Pairs:
    """Without pairs of which one side is empty, or so long that it aligns with anything."""
    files = manifest.tokenizers
    sides = TextTokenizer.load(folder / files.source.file), TextTokenizer.load(folder / files.target.file)
    found = Pairs([], [])
    for first in range(0, len(source), _BATCH):
        lines = slice(first, first + _BATCH)
        for pair in zip(sides[0].encode_batch(source[lines]), sides[1].encode_batch(target[lines]), strict=True):
            if all(0 < len(each) <= LONGEST for each in pair):
                found.source.append(pair[0])
                found.target.append(pair[1])
        advance(len(source[lines]))
    return found


def make_lexicon(
    folder: Path, manifest: Manifest, pairs: Pairs, wanted: Wanted, advance: Callable[[int], None] = lambda count: None
) -> Lexicon:
    sizes = manifest.vocabulary
    source, target = Sentences.of(pairs.source), Sentences.of(pairs.target)
    if not len(source.words):
        raise ConversionError(f"nothing is left to learn from: pairs of 1 to {LONGEST} tokens on both sides are needed")
    table = learn(source, target, sizes.source_size, sizes.target_size, wanted.rounds, advance)
    table = table.best(wanted.best, wanted.least)
    kept = table.source < sizes.source_size  # what no source word explains is frequent, or noise
    first, second = table.source[kept], table.target[kept]
    if manifest.tokenizers.source == manifest.tokenizers.target:  # a name, a number: what is copied
        words = np.arange(min(sizes.source_size, sizes.target_size))
        first, second = np.concatenate([first, words]), np.concatenate([second, words])
    pair = np.unique(first * sizes.target_size + second)
    first, second = np.divmod(pair, sizes.target_size)
    return Lexicon(
        tokenizers=(manifest.tokenizers.source.sha256, manifest.tokenizers.target.sha256),
        always=_always(folder, manifest, target.words, wanted.frequent).astype(np.int32),
        offsets=np.searchsorted(first, np.arange(sizes.source_size + 1)).astype(np.int64),
        words=second.astype(np.int32),
    )


def _always(folder: Path, manifest: Manifest, words: Ints, frequent: int) -> Ints:
    """The end, the most frequent words, and bytes, with which any word can be spelled."""
    size = manifest.vocabulary.target_size
    counts = np.bincount(words, minlength=size)
    best = np.argsort(-counts, kind="stable")[:frequent]
    tokenizer = TextTokenizer.load(folder / manifest.tokenizers.target.file)
    spelled = [word for word in range(min(size, tokenizer.vocab_size)) if _BYTE.fullmatch(tokenizer.token(word))]
    return np.unique(np.concatenate([best[counts[best] > 0], spelled, manifest.vocabulary.eos_ids]).astype(np.int64))


def add_to_version(folder: Path, manifest: Manifest, lexicon: Lexicon) -> Manifest:
    """The file first, under a name of its own, and then the manifest that names it: at no moment is the version broken,
    and a server that watches it takes it up."""
    buffer = io.BytesIO()
    lexicon.save(buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    name = f"shortlist-{digest[:12]}.npz"
    write_whole(folder / name, buffer.getvalue())
    changed = manifest.model_copy(update={"shortlist": File(file=name, sha256=digest)})
    write_whole(folder / MANIFEST_FILE, changed.to_json().encode())
    if manifest.shortlist is not None and manifest.shortlist.file != name:
        (folder / manifest.shortlist.file).unlink(missing_ok=True)
    return changed
