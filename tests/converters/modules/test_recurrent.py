"""The recurrent family in PyTorch: a whole target, step by step, and written out plainly; padding changes nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from beamline.converters.modules.graphs import StepGraph
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
from beamline.converters.modules.recurrent.steps import RecurrentSteps
from beamline.converters.modules.search.tree import Tree
from beamline.serving.contract.manifest import StateKind
from tests.support.checkpoints import PAD, START
from tests.support.recurrent import Shape, covering_shapes, random_recurrent
from tests.support.recurrent_plain import plain_logits

VOCABULARY = 40
LENGTHS = (7, 1, 4)
STEPS = 5
BEAMS = 3
SHAPES = covering_shapes()
assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(LENGTHS))[None, :] < torch.tensor(LENGTHS)[:, None]
    source = torch.where(mask, torch.randint(4, VOCABULARY, mask.shape, generator=generator), PAD)
    target = torch.randint(4, VOCABULARY, (len(LENGTHS), STEPS), generator=generator)
    target[:, 0] = START
    return source, mask, target


def model_of(shape: Shape) -> Recurrent:
    return random_recurrent(shape.config(VOCABULARY), seed=1)


def test_every_pair_is_covered() -> None:
    assert len(SHAPES) < 100
    assert {("coupled-peepholes", "predictive"), ("gru", "fixed")} <= {
        (shape.cell, shape.attention) for shape in SHAPES
    }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@torch.no_grad()
def test_a_batch_is_what_the_sentences_are_alone(shape: Shape) -> None:
    """Teacher forced, all in one padded batch; against torch.nn's own layers, one sentence and word at a time."""
    model = model_of(shape)
    source, mask, target = inputs()
    steps = RecurrentSteps(model)
    logits, attention = steps.score(source, mask, target)
    assert_same(logits, model(source, mask, target), rtol=0, atol=0)
    weights = dict(model.named_parameters())
    for row, length in enumerate(LENGTHS):
        expected, paid = plain_logits(model.config, weights, source[row, :length].tolist(), target[row].tolist())
        assert_same(logits[row], expected)
        if paid is not None:
            assert_same(attention[row, :, :length], paid / paid.sum(-1, keepdim=True))
        assert not attention[row, :, length:].any()
        assert_same(attention[row].sum(-1), torch.ones(STEPS))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@torch.no_grad()
def test_steps_follow_their_beams(shape: Shape) -> None:
    """Beams that split and die, step by step: each is what its sequence is, teacher forced."""
    generator = torch.Generator().manual_seed(2)
    model = model_of(shape)
    steps = RecurrentSteps(model)
    source, mask, _ = inputs()
    batch = len(source)
    tensors = steps.state_tensors()
    names = [tensor.name for tensor in tensors if tensor.kind is StateKind.MEMORY]
    encoded = steps.encode(source, mask)
    memory_count = len([name for name in names if name != "source_mask"])
    memory = (*((mask,) if "source_mask" in names else ()), *encoded[:memory_count])
    states = tuple(start[:, None].expand(-1, BEAMS, -1) for start in encoded[memory_count:])
    recurrent = [tensor for tensor in tensors if tensor.kind is StateKind.RECURRENT]
    assert [tuple(state.shape) for state in states] == [(batch, BEAMS, tensor.shape[2]) for tensor in recurrent]
    write_index = torch.zeros(batch, dtype=torch.int64)
    tree = Tree.grow(torch.zeros(batch, BEAMS, 4, dtype=torch.bool), write_index)
    tokens = torch.full((batch, BEAMS), START)
    kept = [[[START]] * BEAMS for _ in range(batch)]
    for position in range(STEPS):
        logits, states = steps.step(tokens, torch.full((batch,), position), tree, memory, states)
        for row in range(batch):
            target = torch.tensor(kept[row])
            expected = model(source[row].expand(BEAMS, -1), mask[row].expand(BEAMS, -1), target)[:, -1]
            assert_same(logits[row], expected)
        parents = torch.randint(0, BEAMS, (batch, BEAMS), generator=generator)
        tokens = torch.randint(4, VOCABULARY, (batch, BEAMS), generator=generator)
        states = tuple(StepGraph.follow(StateKind.RECURRENT, state, parents) for state in states)
        kept = [
            [
                [*kept[row][parent], token]
                for parent, token in zip(parents[row].tolist(), tokens[row].tolist(), strict=True)
            ]
            for row in range(batch)
        ]
