"""Small recurrent models with random weights: every pair of choices occurs together in one of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
from tests.support.checkpoints import EOS, PAD, START, sentencepiece_model, vocabulary_size

LONGEST = 64
WIDTH = 12  # of the decoder's states; all others follow from it

CELLS: dict[str, dict[str, Any]] = {
    "rnn_tanh": {"cell": "rnn_tanh"},
    "rnn_relu": {"cell": "rnn_relu"},
    "lstm": {"cell": "lstm"},
    "gru": {"cell": "gru"},
    "peepholes": {"cell": "lstm", "peepholes": True},
    "coupled": {"cell": "lstm", "coupled_gates": True},
    "coupled-peepholes": {"cell": "lstm", "coupled_gates": True, "peepholes": True},
}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "none": {"attention": "none"},
    "fixed": {"attention": "none", "fixed_context": True},
    "additive": {"attention": "additive"},
    "dot": {"attention": "dot"},
    "scaled_dot": {"attention": "scaled_dot"},
    "general": {"attention": "general"},
    "monotonic": {"attention": "dot", "window": "monotonic", "window_radius": 3},
    "predictive": {"attention": "general", "window": "predictive", "window_radius": 4},
}
DIRECTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reversed": {"reverse_source": True},
    "concat": {"bidirectional": "all"},
    "sum": {"bidirectional": "all", "merge": "sum"},
    "mean": {"bidirectional": "all", "merge": "mean"},
    "bottom": {"bidirectional": "bottom"},
}
DEPTHS = (1, 2, 3, 8)
BRIDGES = ("copy", "linear", "tanh", "top", "zero")
FLOWS: dict[str, dict[str, Any]] = {
    "new": {"attention_order": "new"},
    "fed": {"attention_order": "new", "input_feeding": True},
    "previous": {"attention_order": "previous"},
    "gnmt": {"attention_order": "previous", "attention_layer": "bottom", "context_to": "all"},
    "new-bottom": {"attention_order": "new", "attention_layer": "bottom", "context_to": "all"},
}
HEADS: dict[str, dict[str, Any]] = {
    "tied": {"readout": "tanh", "tie_output": True},
    "untied": {"readout": "tanh", "tie_output": False, "share_embeddings": False},
    "linear": {"readout": "linear", "tie_output": False, "output_bias": False, "readout_embedding": True},
    "bare": {"readout": "none", "tie_output": False, "readout_embedding": True},
}


@dataclass(frozen=True)
class Shape:
    cell: str = "gru"
    attention: str = "additive"
    directions: str = "concat"
    depth: int = 1
    bridge: str = "tanh"
    flow: str = "new"
    head: str = "tied"
    residual: bool = False

    @property
    def name(self) -> str:
        parts = [str(getattr(self, field.name)) for field in fields(self)[:-1]]
        return "-".join([*parts, *(["residual"] if self.residual else [])])

    def config(self, vocabulary: int, **changes: Any) -> RecurrentConfig:
        """Choices that another one makes senseless give way."""
        chosen = {**ATTENTIONS[self.attention], **DIRECTIONS[self.directions], **HEADS[self.head], **CELLS[self.cell]}
        narrow = chosen.get("bidirectional") == "all" and chosen.get("merge", "concat") == "concat"
        concatenated_top = narrow or (self.directions == "bottom" and self.depth == 1)
        flow = dict(FLOWS[self.flow])
        if chosen["attention"] == "none":
            flow = {name: value for name, value in flow.items() if name == "context_to"} if self.flow == "gnmt" else {}
        elif self.flow == "new-bottom" and self.depth == 1:
            flow.pop("context_to")
        bridge, origin = self.bridge, "each"
        if bridge == "top" or (bridge == "copy" and self.directions == "bottom"):
            origin = "top"
        bridge = {"top": "tanh"}.get(bridge, bridge)
        if bridge == "zero" and self.attention == "none":
            bridge = "linear"
        config = RecurrentConfig(
            source_vocab_size=vocabulary,
            target_vocab_size=vocabulary,
            embedding_width=10,
            encoder_width=WIDTH // 2 if concatenated_top else WIDTH,
            decoder_width=WIDTH,
            encoder_layers=self.depth,
            decoder_layers=self.depth,
            pad_id=PAD,
            eos_id=EOS,
            decoder_start_id=START,
            residual_from=2 if self.residual and self.depth > 2 else None,
            bridge=bridge,
            bridge_from=origin,
            attention_width=7,
            readout_width=10,
            max_positions=LONGEST,
            dropout=0.0,
            **chosen,
            **flow,
        )
        config = replace(config, **changes)
        assert config.problems() == [], config.problems()
        return config


VALUES: dict[str, Sequence[Any]] = {
    "cell": list(CELLS),
    "attention": list(ATTENTIONS),
    "directions": list(DIRECTIONS),
    "depth": DEPTHS,
    "bridge": BRIDGES,
    "flow": list(FLOWS),
    "head": list(HEADS),
    "residual": (False, True),
}


def pairs(shape: Shape) -> Iterator[tuple[str, Any, str, Any]]:
    for one, other in combinations(VALUES, 2):
        yield one, getattr(shape, one), other, getattr(shape, other)


def covering_shapes() -> list[Shape]:
    """Greedily, the best of some random ones each time, begun with a pair that is still missing."""
    chance = random.Random(0)
    missing = {(a, x, b, y) for a, b in combinations(VALUES, 2) for x in VALUES[a] for y in VALUES[b]}
    chosen: list[Shape] = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        tries = [
            Shape(**{**{name: chance.choice(values) for name, values in VALUES.items()}, a: x, b: y}) for _ in range(40)
        ]
        best = max(tries, key=lambda shape: len(missing.intersection(pairs(shape))))
        missing.difference_update(pairs(best))
        chosen.append(best)
    return chosen


def random_recurrent(config: RecurrentConfig, seed: int = 0) -> Recurrent:
    return _randomised(config, seed, gain=1.2)


def lively_recurrent(config: RecurrentConfig, seed: int = 0) -> Recurrent:
    """Its translations depend on the source and, where the output has a bias, end by themselves after a while."""
    # Deep stacks of strong weights, and plain tanh cells, are chaotic: PyTorch's own float32 would be 1e-3 and more
    # away from its float64.
    bearable = {"rnn_tanh": 1.1, "gru": 2.5 if config.encoder_layers == 1 else 1.8}
    gain = 2.5 if config.encoder_layers <= 3 else 1.5
    model = _randomised(config, seed, gain=min(gain, bearable.get(config.cell, gain)))
    if model.output.bias is not None:
        with torch.no_grad():
            model.output.bias[EOS] += 2.5
    return model


def _randomised(config: RecurrentConfig, seed: int, gain: float) -> Recurrent:
    model = Recurrent(config).eval()
    generator = torch.Generator().manual_seed(seed)
    if config.cell == "rnn_relu":
        gain = 0.6 if config.encoder_layers <= 3 else 0.4  # nothing bounds it: it would grow from layer to layer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embedding" in name or name.startswith("output"):
                spread = 0.8
            elif parameter.dim() == 1 or "peephole" in name:
                spread = 0.2
            else:
                spread = gain * parameter.shape[1] ** -0.5
            parameter.normal_(std=spread, generator=generator)
    return model


def write_recurrent(folder: Path, model: Recurrent, **beside: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "beamline_recurrent", **model.config.to_json(), **beside}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, folder / "model.safetensors"
    )
    (folder / "spm.model").write_bytes(sentencepiece_model())
    return folder


def text_vocabulary() -> int:
    return vocabulary_size()
