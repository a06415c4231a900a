"""What Hugging Face's `generate` answers on the same weights: the oracle of our search. Kept by the cache of fixtures,
because it takes longer than what is compared with it, and every backend is compared with the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tests.support.fixture_cache import fixture_cache
from tests.support.language_models import EOS, SECOND_EOS, ConvertedLanguageModel
from tests.support.marian_shape import BAD, MAX_LENGTH, PAD, MarianShape
from tests.support.seq2seq import ConvertedSeq2Seq


@dataclass(frozen=True)
class Theirs:
    tokens: list[int]
    log_probs: list[float]
    score: float | None  # of greedy search there is none


def translations(
    model: MarianShape, sources: Sequence[list[int]], options: dict[str, Any], beams: int, prefix: tuple[int, ...] = ()
) -> list[list[Theirs]]:
    """All hypotheses for each source; `options` in Hugging Face's words."""
    found = fixture_cache().answers(
        _translations,
        weights=_hash(model.original),
        model=model,
        sources=list(sources),
        options=options,
        beams=beams,
        prefix=prefix,
    )
    return [[Theirs(**hypothesis) for hypothesis in answers] for answers in found]


def seq2seq_answers(
    model: ConvertedSeq2Seq,
    sources: Sequence[list[int]],
    options: dict[str, Any],
    beams: int,
    prompt: tuple[int, ...] = (),
) -> list[list[Theirs]]:
    """The same of any encoder-decoder; `prompt` is what the decoder begins with, its start token unless said."""
    found = fixture_cache().answers(
        _seq2seq_answers,
        weights=_hash(model.original),
        model=model,
        sources=list(sources),
        options=options,
        beams=beams,
        prompt=prompt or (model.manifest.vocabulary.start_id,),
    )
    return [[Theirs(**hypothesis) for hypothesis in answers] for answers in found]


def texts(
    model: ConvertedLanguageModel, prompts: Sequence[list[int]], options: dict[str, Any], beams: int
) -> list[list[Theirs]]:
    """The same of a language model."""
    weights = _hash(model.original)
    found = fixture_cache().answers(
        _texts, weights=weights, model=model, prompts=list(prompts), options=options, beams=beams
    )
    return [[Theirs(**hypothesis) for hypothesis in answers] for answers in found]


def _hash(original: torch.nn.Module) -> str:
    """Of the weights that really answer: a test may have changed those of the model that it was given."""
    content = hashlib.sha256()
    for name, tensor in sorted(original.state_dict().items()):
        content.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def _translations(
    model: MarianShape,
    sources: list[list[int]],
    options: dict[str, Any],
    beams: int,
    prefix: tuple[int, ...],
    weights: str,
) -> list[list[dict[str, Any]]]:
    given = {"max_length": MAX_LENGTH, "length_penalty": 1.0, **options}
    if model.renormalise:
        given["renormalize_logits"] = True
        given["bad_words_ids"] = [[BAD], *given.get("bad_words_ids", [])]
    prompt = [PAD, *prefix]
    ends = model.manifest.vocabulary.eos_ids
    return [
        _generate(
            model.original, source, beams, prompt, ends, PAD, {**given, "decoder_input_ids": torch.tensor([prompt])}
        )
        for source in sources
    ]


def _seq2seq_answers(
    model: ConvertedSeq2Seq,
    sources: list[list[int]],
    options: dict[str, Any],
    beams: int,
    prompt: tuple[int, ...],
    weights: str,
) -> list[list[dict[str, Any]]]:
    vocabulary = model.manifest.vocabulary
    begin = {"decoder_input_ids": torch.tensor([prompt]), "decoder_start_token_id": prompt[0]}
    given = {"length_penalty": 1.0, **options, **begin}
    ends = vocabulary.eos_ids
    return [
        _generate(model.original, source, beams, list(prompt), ends, vocabulary.pad_id, given) for source in sources
    ]


def _texts(
    model: ConvertedLanguageModel, prompts: list[list[int]], options: dict[str, Any], beams: int, weights: str
) -> list[list[dict[str, Any]]]:
    given = {"length_penalty": 1.0, **options}
    return [_generate(model.original, each, beams, each, (EOS, SECOND_EOS), None, given) for each in prompts]


def _generate(
    original: Any,
    tokens: list[int],
    beams: int,
    prompt: list[int],
    eos_ids: Sequence[int],
    pad: int | None,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """The hypotheses behind `prompt`. Where there is no padding token, an end token pads."""
    if beams == 1:
        options = {name: value for name, value in options.items() if name not in ("early_stopping", "length_penalty")}
    found = original.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        eos_token_id=list(eos_ids),
        pad_token_id=eos_ids[0] if pad is None else pad,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    # Greedy's scores are edited logits, beam search's are log-probabilities.
    transitions = original.compute_transition_scores(
        found.sequences, found.scores, getattr(found, "beam_indices", None), normalize_logits=beams == 1
    )
    answers = []
    for row in range(beams):
        written = found.sequences[row, len(prompt) :].tolist()
        ends = [index for index, token in enumerate(written) if token in eos_ids]
        length = ends[0] + 1 if ends else len(written)
        while length and not ends and written[length - 1] == pad:
            length -= 1  # padding up to the longest of the answers
        score = None if beams == 1 else float(found.sequences_scores[row])
        answers.append(asdict(Theirs(written[:length], transitions[row, :length].tolist(), score)))
    return answers
