"""Parallel text: the vocabulary, token arrays cached on disk, and batches of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from examples.translation.settings import Settings

PAD, UNKNOWN, START, END = 0, 1, 2, 3
Ints = NDArray[np.int64]
LONGEST_CHAIN = 4  # lines in one joined sample


def read_lines(path: Path) -> list[str]:
    # not splitlines(), which also breaks at characters such as U+2028 that stand inside a sentence
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\r\n") for line in file]


def train_vocabulary(settings: Settings, data: Path, path: Path) -> None:
    """One vocabulary for both languages. Byte fallback: no input is ever unknown, emoji included."""
    sentencepiece.SentencePieceTrainer.train(
        input=[str(data / f"train.{settings.source}"), str(data / f"train.{settings.target}")],
        model_prefix=str(path.with_suffix("")),
        vocab_size=settings.vocab_size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.9999,
        pad_id=PAD,
        unk_id=UNKNOWN,
        bos_id=START,
        eos_id=END,
        input_sentence_size=1_000_000,
        shuffle_input_sentence=True,
        minloglevel=2,
    )


def load_vocabulary(path: Path) -> sentencepiece.SentencePieceProcessor:
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = (vocabulary.pad_id(), vocabulary.unk_id(), vocabulary.bos_id(), vocabulary.eos_id())
    if ids != (PAD, UNKNOWN, START, END):
        raise ValueError(f"{path}: pad, unk, bos, eos must be {PAD}, {UNKNOWN}, {START}, {END}, not {ids}")
    return vocabulary


@dataclass(frozen=True)
class Tokens:
    """Many sequences in one array: sequence i is `flat[bounds[i] : bounds[i + 1]]`, without END."""

    flat: NDArray[np.int32]
    bounds: Ints

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.flat[self.bounds[index] : self.bounds[index + 1]]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.bounds)

    @classmethod
    def load(cls, text: Path, vocabulary: sentencepiece.SentencePieceProcessor, cache: Path) -> Tokens:
        """Tokenised once: the cache's name carries the text's state and the vocabulary."""
        state = f"{text.resolve()} {text.stat().st_size} {text.stat().st_mtime_ns}".encode()
        key = hashlib.sha256(state + vocabulary.serialized_model_proto()).hexdigest()[:16]
        stem = cache / f"{text.name}.{key}"
        files = stem.with_name(stem.name + ".flat.npy"), stem.with_name(stem.name + ".bounds.npy")
        if not all(file.exists() for file in files):
            lines = read_lines(text)
            parts, lengths = [], []
            for start in tqdm(range(0, len(lines), 10_000), desc=f"tokenise {text.name}", disable=None):
                encoded = vocabulary.encode(lines[start : start + 10_000])
                lengths += [len(ids) for ids in encoded]
                parts.append(np.array([token for ids in encoded for token in ids], dtype=np.int32))
            cache.mkdir(parents=True, exist_ok=True)
            flat = np.concatenate([np.zeros(0, dtype=np.int32), *parts])
            for file, array in zip(files, (flat, np.cumsum([0, *lengths])), strict=True):
                partial = file.with_suffix(".tmp.npy")  # a killed run leaves no half-written cache
                np.save(partial, array)
                partial.replace(file)
        return cls(np.load(files[0]), np.load(files[1]))


@dataclass(frozen=True)
class Batch:
    source: Tensor  # [B, S], ends in END
    source_mask: Tensor  # [B, S], true where there is a token
    target: Tensor  # [B, T], begins with START: what the decoder reads
    labels: Tensor  # [B, T], ends in END: what it has to say
    tokens: int  # labels that aren't padding


def pad(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def make_batch(sources: list[list[int]], targets: list[list[int]]) -> Batch:
    source, labels = pad([[*s, END] for s in sources]), pad([[*t, END] for t in targets])
    return Batch(
        source=source,
        source_mask=pad([[1] * (len(s) + 1) for s in sources]).bool(),
        target=pad([[START, *t] for t in targets]),
        labels=labels,
        tokens=sum(map(len, targets)) + len(targets),
    )


@dataclass(frozen=True)
class Samples:
    """Sample i is the lines `order[bounds[i] : bounds[i + 1]]` in a row; nearly always that is one line."""

    order: Ints
    bounds: Ints

    def lengths(self, tokens: Tokens) -> Ints:
        """With END."""
        return np.add.reduceat(tokens.lengths[self.order], self.bounds[:-1]) + 1

    def join(self, tokens: Tokens, sample: int) -> list[int]:
        lines = self.order[self.bounds[sample] : self.bounds[sample + 1]]
        return [int(token) for line in lines for token in tokens[line]]


@dataclass(frozen=True)
class Corpus:
    """Aligned sequences, and how often each is drawn per epoch."""

    sources: Tokens
    targets: Tokens
    weights: NDArray[np.float64]
    max_length: int  # with END

    @classmethod
    def load(
        cls,
        data: Path,
        split: str,
        settings: Settings,
        vocabulary: sentencepiece.SentencePieceProcessor,
        cache: Path,
        max_length: int,
    ) -> Corpus:
        sources, targets = (
            Tokens.load(data / f"{split}.{side}", vocabulary, cache) for side in (settings.source, settings.target)
        )
        if len(sources) != len(targets):
            raise ValueError(f"{split}: {len(sources)} source lines, but {len(targets)} target lines")
        weights = np.ones(len(sources))
        origins = data / f"{split}.src"
        if origins.exists() and settings.origin_weights:
            names = read_lines(origins)
            if len(names) != len(weights):
                raise ValueError(f"{origins}: {len(names)} lines for {len(weights)} pairs")
            weights = np.array([settings.origin_weights.get(name, 1.0) for name in names])
        fits = (sources.lengths < max_length) & (targets.lengths < max_length)
        weights *= fits & (sources.lengths > 0) & (targets.lengths > 0)
        return cls(sources, targets, weights, max_length)

    def samples(self, seed: tuple[int, int], join: float) -> Samples:
        """One epoch's draw: a weight of 0.15 is a chance, one of 2.5 is twice and a chance of a third."""
        random = np.random.default_rng(seed)
        copies = np.floor(self.weights + random.random(len(self.weights))).astype(np.int64)
        order = random.permutation(np.repeat(np.arange(len(copies)), copies))
        chained = random.random(len(order)) < join
        sizes = np.where(chained, random.integers(2, LONGEST_CHAIN + 1, len(order)), 1)
        bounds = np.cumsum(np.concatenate([[0], sizes]))
        bounds = np.concatenate([bounds[bounds < len(order)], [len(order)]])
        return Samples(order, bounds)

    def batches(self, samples: Samples, batch_tokens: int) -> list[Ints]:
        """Samples of like lengths together, so that little is padded: sample numbers for each batch."""
        source, target = samples.lengths(self.sources), samples.lengths(self.targets)
        # sorting is stable and the samples are shuffled: equal lengths meet new neighbours each epoch
        order = np.lexsort((source, target))
        order = order[(source[order] <= self.max_length) & (target[order] <= self.max_length)]
        cuts, widest = [0], 0
        for position, sample in enumerate(order):
            widest = max(widest, target[sample], source[sample])
            if widest * (position - cuts[-1] + 1) > batch_tokens and position > cuts[-1]:
                cuts.append(position)
                widest = max(target[sample], source[sample])
        return [order[start:end] for start, end in pairwise([*cuts, len(order)]) if end > start]

    def epoch(self, number: int, settings: Settings, skip: int = 0) -> Iterator[Batch]:
        """Batches in an order that seed and number decide alone: a resumed run skips what it has seen."""
        seed = settings.seed, number
        samples = self.samples(seed, settings.join)
        batches = self.batches(samples, settings.batch_tokens)
        for index in np.random.default_rng(seed).permutation(len(batches))[skip:]:
            yield make_batch(
                [samples.join(self.sources, int(sample)) for sample in batches[index]],
                [samples.join(self.targets, int(sample)) for sample in batches[index]],
            )

    def in_order(self, batch_tokens: int) -> Iterator[Batch]:
        """Every line that fits, once: for validation."""
        lines = np.flatnonzero(self.weights > 0)
        samples = Samples(lines, np.arange(len(lines) + 1))
        for batch in self.batches(samples, batch_tokens):
            yield make_batch(
                [samples.join(self.sources, int(sample)) for sample in batch],
                [samples.join(self.targets, int(sample)) for sample in batch],
            )
