"""The recipe's search, many sentences at once, against the plainest one, sentence by sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beamline.serving.engine.options import DecodingOptions
from examples.translation.data import END, PAD, START, pad
from examples.translation.models import build
from examples.translation.search import beam_search, greedy
from tests.support.plain_search import plain_search, teacher_forced

SHAPES: dict[str, dict[str, Any]] = {
    "transformer": {
        "d_model": 16,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "ffn": 32,
        "max_positions": 32,
    },
    "recurrent": {
        "cell": "gru",
        "embedding_width": 12,
        "encoder_width": 8,
        "encoder_layers": 1,
        "decoder_width": 16,
        "decoder_layers": 1,
        "attention_width": 8,
        "readout_width": 12,
        "max_positions": 32,
    },
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_it_finds_what_the_plainest_search_finds(kind: str, width: int) -> None:
    torch.manual_seed(3)
    # Untied, because a tied model likes to say its last word again; and it has to find END very likely now and then.
    model = build(kind, SHAPES[kind] | {"tie_output": False}, vocab_size=9).eval()
    with torch.no_grad():
        model.output.weight[END] *= 8
    sources = [[*torch.randint(4, 9, (length,)).tolist(), END] for length in (1, 3, 3, 5, 8, 9, 2, 6)]
    limits = [12, 5, 12, 12, 4, 12, 2, 12]
    source = pad(sources)
    mask = source != PAD
    found = beam_search(model, source, mask, limits, width) if width > 1 else greedy(model, source, mask, limits)
    for ids, limit, answer in zip(sources, limits, found, strict=True):
        options = DecodingOptions(beam_size=width, num_hypotheses=1, max_length=limit)
        expected = plain_search(teacher_forced(model, ids), options, START, END)[0].tokens
        assert answer == [token for token in expected if token != END]
    assert any(len(answer) + 1 < limit for answer, limit in zip(found, limits, strict=True)), "none ended by itself"
