"""Decoding step by step over the tree, in plain PyTorch, against the whole target at once: no export, no runtime."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from beamline.converters.modules.graphs import EncoderGraph, SearchConstants, StepGraph
from beamline.converters.modules.search.beam_search import DEAD
from beamline.converters.modules.search.tree import Tree
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.reference import TransformerConfig
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.serving.contract.manifest import StateKind
from tests.support.checkpoints import EOS, PAD, START, reference_config, reference_model

BATCH, BEAMS, STEPS = 3, 4, 7
assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)

CONFIGS = [
    reference_config(
        vocabulary=50,
        norm=norm,
        final_norm=number % 2 == 0,
        positions=positions,
        activation=activation,
        share_embeddings=sharing[0],
        tie_output=sharing[1],
        output_bias=not sharing[1],
        encoder_layers=1 + number % 2,
        decoder_layers=2 - number % 2,
    )
    for number, (norm, positions, activation, sharing) in enumerate(
        product(
            ("pre", "post"),
            ("sinusoidal", "sinusoidal_halves", "learned"),
            ("relu", "gelu", "silu"),
            ((True, True), (False, True), (False, False)),
        )
    )
]


def name_of(config: TransformerConfig) -> str:
    words = (config.norm, config.positions, config.activation)
    flags = (config.final_norm, config.share_embeddings, config.tie_output)
    return "-".join((*words, "".join(str(int(flag)) for flag in flags)))


def random_sources(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[B, S] of different lengths, and their mask."""
    lengths = torch.tensor([9, 1, 5])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    words = torch.randint(4, size, mask.shape, generator=generator)
    return torch.where(mask, words, PAD), mask


def empty_caches(steps: EncoderDecoderSteps, entries: int) -> tuple[Tensor, ...]:
    """Filled with nonsense: what is not visible must not matter."""
    sizes = {"B": BATCH, "C": entries}
    return tuple(
        torch.full([sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape], 77.0)
        for tensor in steps.state_tensors()
        if tensor.kind is StateKind.CACHE
    )


def last_logits(model: EncoderDecoderTransformer, source: Tensor, mask: Tensor, sequences: list[list[int]]) -> Tensor:
    """[sequences, V], by teacher forcing. Without the padding, which must not matter either."""
    words = source[mask].expand(len(sequences), -1)
    found: Tensor = model(words, torch.ones_like(words, dtype=torch.bool), torch.tensor(sequences))
    return found[:, -1]


@torch.no_grad()
def check_random_trees(model: EncoderDecoderTransformer, tolerance: float = 1e-5) -> None:
    """Random parents and words; and the requests have 4, 2 and 1 of the 4 beams."""
    generator = torch.Generator().manual_seed(1)
    steps = EncoderDecoderSteps(model)
    source, mask = random_sources(model.architecture.encoder.vocab_size, generator)
    memory = (mask, *steps.encode(source, mask))
    states = empty_caches(steps, BEAMS * (STEPS + 1))
    width = torch.tensor([4, 2, 1])
    tokens = torch.full((BATCH, BEAMS), START)
    ancestry = torch.zeros(BATCH, BEAMS, BEAMS * (STEPS + 1), dtype=torch.bool)
    write_index = torch.zeros(BATCH, dtype=torch.int64)
    kept = [[[START] for _ in range(int(beams))] for beams in width]
    for step in range(STEPS):
        tree = Tree.grow(ancestry, write_index)
        positions = torch.full((BATCH,), step)
        logits, states = steps.step(tokens, positions, tree, memory, states)
        for row, sequences in enumerate(kept):
            expected = last_logits(model, source[row], mask[row], sequences)
            torch.testing.assert_close(logits[row, : len(sequences)], expected, rtol=tolerance, atol=tolerance)
        parents = (torch.rand(BATCH, BEAMS, generator=generator) * width[:, None]).long()
        tokens = torch.randint(4, model.architecture.decoder.vocab_size, (BATCH, BEAMS), generator=generator)
        ancestry = tree.ancestry_of(parents)
        write_index = write_index + width
        kept = [
            [[*sequences[int(parents[row, beam])], int(tokens[row, beam])] for beam in range(len(sequences))]
            for row, sequences in enumerate(kept)
        ]


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_steps_over_random_trees_are_teacher_forcing(config: TransformerConfig) -> None:
    check_random_trees(reference_model(config, seed=1))


@pytest.mark.parametrize("config", CONFIGS[::7], ids=name_of)
@torch.no_grad()
def test_the_step_graph_searches_over_teacher_forced_scores(config: TransformerConfig) -> None:
    """Each step's candidates are the best of all continuations, and the beams are the best of those that don't end."""
    generator = torch.Generator().manual_seed(2)
    model = reference_model(config, seed=2)
    steps = EncoderDecoderSteps(model)
    graph = StepGraph(steps, SearchConstants((EOS,), 2, renormalise=False))
    source, mask = random_sources(config.source_vocab_size, generator)
    state = (mask, *EncoderGraph(steps)(source, mask), *empty_caches(steps, BEAMS * (STEPS + 1)))
    memory_count = graph.memory_count
    scores = torch.full((BATCH, BEAMS), DEAD)
    scores[:, 0] = 0
    tokens = torch.full((BATCH, BEAMS), START)
    positions = write_index = torch.zeros(BATCH, dtype=torch.int64)
    ancestry = torch.zeros(BATCH, BEAMS, BEAMS * (STEPS + 1), dtype=torch.bool)
    width = torch.full((BATCH,), BEAMS)
    no_edits, nobody = torch.zeros(BATCH, BEAMS, 0), torch.zeros(0, dtype=torch.int64)
    kept = [[[START]] * BEAMS for _ in range(BATCH)]
    for _ in range(STEPS):
        found = graph(
            tokens,
            positions,
            write_index,
            scores,
            ancestry,
            width,
            torch.zeros(BATCH, dtype=torch.bool),
            torch.full((BATCH,), -1),
            no_edits.long(),
            no_edits,
            no_edits,
            nobody,
            torch.zeros(0, 5),
            nobody,
            state,
        )
        tokens, positions, write_index, next_scores, ancestry, parents = found[:6]
        candidate_scores, candidate_tokens, candidate_parents = found[6:9]
        for row in range(BATCH):
            log_probs = last_logits(model, source[row], mask[row], kept[row]).log_softmax(-1)
            totals = log_probs + scores[row][:, None]  # [K, V]
            best = totals.flatten().topk(2 * BEAMS).values
            assert_same(candidate_scores[row], best)
            chosen = totals[candidate_parents[row], candidate_tokens[row]]
            assert_same(candidate_scores[row], chosen)
            living = [index for index, token in enumerate(candidate_tokens[row].tolist()) if token != EOS]
            assert tokens[row].tolist() == candidate_tokens[row][living[:BEAMS]].tolist()
            assert next_scores[row].tolist() == candidate_scores[row][living[:BEAMS]].tolist()
            kept[row] = [
                [*kept[row][parent], token]
                for parent, token in zip(parents[row].tolist(), tokens[row].tolist(), strict=True)
            ]
        scores = next_scores
        state = (*state[:memory_count], *found[11:])


@torch.no_grad()
def test_the_score_graph_pays_attention_to_the_source_only() -> None:
    model = reference_model(reference_config(vocabulary=50, decoder_layers=3), seed=3)
    source, mask = random_sources(model.config.source_vocab_size, torch.Generator().manual_seed(3))
    target = torch.tensor([[START, 5, 6], [START, 7, 8], [START, 9, 10]])
    logits, attention = EncoderDecoderSteps(model).score(source, mask, target)
    assert_same(logits, model(source, mask, target))
    assert_same(attention.sum(-1), torch.ones(BATCH, 3))
    assert not attention.masked_select(~mask[:, None, :].expand(attention.shape)).any()
