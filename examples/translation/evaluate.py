"""How good a model is: likelihood of the references, and BLEU and chrF of its own translations.

python -m examples.translation.evaluate CHECKPOINT --source FILE --reference FILE --beam 4
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import sacrebleu
import sentencepiece
import torch
from tqdm import tqdm

from examples.translation.card import Quality
from examples.translation.data import END, PAD, Batch, load_vocabulary, pad, read_lines
from examples.translation.loss import projected_loss
from examples.translation.models import VOCABULARY, Model, hidden_states, load
from examples.translation.search import beam_search, greedy
from examples.translation.settings import MAX_LENGTH_EXTRA, MAX_LENGTH_FACTOR


@dataclass(frozen=True)
class Scores:
    valid_nll: float  # per target token, END included
    perplexity: float
    bleu: float
    chrf: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


@torch.inference_mode()
def mean_nll(model: Model, batches: Iterable[Batch]) -> float:
    nll, tokens = 0.0, 0
    for batch in batches:
        memory = model.encode(batch.source, batch.source_mask)
        hidden = hidden_states(model, memory, batch.source_mask, batch.target)
        real = batch.labels != PAD
        nll += projected_loss(hidden[real], model.output, batch.labels[real], smoothing=0.0).nll.item()
        tokens += batch.tokens
    return nll / max(1, tokens)


def translate(
    model: Model,
    vocabulary: sentencepiece.SentencePieceProcessor,
    lines: list[str],
    beam: int = 1,
    batch_lines: int = 64,
    advance: Callable[[int], object] = lambda lines: None,
) -> list[str]:
    room = model.config.max_positions
    encoded = [[*ids[: room - 1], END] for ids in vocabulary.encode(lines)]
    answers = [""] * len(lines)
    order = sorted(range(len(lines)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), batch_lines):
        chosen = order[start : start + batch_lines]
        source = pad([encoded[index] for index in chosen])
        limits = [longest_answer(len(encoded[index]), room) for index in chosen]
        found = (
            greedy(model, source, source != PAD, limits)
            if beam == 1
            else beam_search(model, source, source != PAD, limits, beam)
        )
        for index, ids in zip(chosen, found, strict=True):
            answers[index] = vocabulary.decode(ids)
        advance(len(chosen))
    return answers


def longest_answer(source: int, room: int) -> int:
    """As the server has it, by the defaults that a checkpoint carries."""
    return min(room, math.ceil(MAX_LENGTH_FACTOR * source) + MAX_LENGTH_EXTRA)


def score(
    model: Model,
    vocabulary: sentencepiece.SentencePieceProcessor,
    batches: Iterable[Batch],
    sources: list[str],
    references: list[str],
) -> Scores:
    nll = mean_nll(model, batches)
    answers = translate(model, vocabulary, sources)
    found = quality_of(answers, references)
    return Scores(valid_nll=nll, perplexity=math.exp(min(nll, 50.0)), bleu=found.bleu, chrf=found.chrf)


def quality_of(answers: list[str], references: list[str]) -> Quality:
    bleu, chrf = sacrebleu.corpus_bleu(answers, [references]), sacrebleu.corpus_chrf(answers, [references])
    return Quality(bleu.score, chrf.score)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.translation.evaluate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="the lines to translate")
    parser.add_argument("--reference", type=Path, required=True, metavar="FILE", help="their translations")
    parser.add_argument("--beam", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--lines", type=int, metavar="N", help="only the first N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the translations there")
    options = parser.parse_args(given)
    try:
        model, vocabulary = load(options.checkpoint).eval(), load_vocabulary(options.checkpoint / VOCABULARY)
        sources, references = (read_lines(path)[: options.lines] for path in (options.source, options.reference))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
    with tqdm(total=len(sources), unit=" lines", disable=None) as bar:
        answers = translate(model, vocabulary, sources, options.beam, advance=bar.update)
    if options.output:
        options.output.write_text("".join(f"{line}\n" for line in answers), encoding="utf-8")
    print(f"BLEU / chrF of {len(answers):,} lines, beam {options.beam}: {quality_of(answers, references)}")


if __name__ == "__main__":
    main()
