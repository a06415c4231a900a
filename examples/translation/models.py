"""Which models the recipe can train, and the checkpoint directory that the converters read.

A model offers `encode(source, source_mask)`, `decode(memory, source_mask, target)`, and an
`output` projection onto the vocabulary. To add one, add a line to KINDS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
from beamline.converters.modules.transformer.reference import Transformer, TransformerConfig
from examples.translation.data import END, PAD, START
from examples.translation.settings import SERVED

Model = Transformer | Recurrent
WEIGHTS, CONFIG, VOCABULARY = "model.safetensors", "config.json", "spm.model"


@dataclass(frozen=True)
class Kind:
    model_type: str  # as config.json names it
    config: Callable[..., Any]  # the class of `module`'s config
    module: type[Model]


KINDS = {
    "transformer": Kind("beamline_transformer", TransformerConfig, Transformer),
    "recurrent": Kind("beamline_recurrent", RecurrentConfig, Recurrent),
    "gnmt": Kind("beamline_recurrent", RecurrentConfig.gnmt, Recurrent),  # by its width, and what shall differ
}


def build(kind: str, architecture: dict[str, Any], vocab_size: int) -> Model:
    if kind not in KINDS:
        raise ValueError(f"model is {kind!r}; allowed: {', '.join(map(repr, KINDS))}")
    config = KINDS[kind].config(
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        pad_id=PAD,
        eos_id=END,
        decoder_start_id=START,
        **architecture,
    )
    if problems := config.problems():
        raise ValueError("architecture: " + "; ".join(problems))
    return KINDS[kind].module(config)


def hidden_states(model: Model, memory: Any, source_mask: Tensor, target: Tensor) -> Tensor:
    """What `output` turns into logits, [B, T, d]: apart, because few of them may need logits. `memory` is what the
    model's own `encode` gave."""
    hidden, _ = model.decode(memory, source_mask, target)
    return hidden


def weights_of(model: Model) -> dict[str, Tensor]:
    """Every weight once: tied tensors under the first of their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: Model, weights: dict[str, Tensor]) -> None:
    """The reverse; it doesn't matter which name of a tied tensor was stored."""
    own = model.state_dict(keep_vars=True)
    if unknown := weights.keys() - own.keys():
        raise ValueError(f"unknown weights: {', '.join(sorted(unknown))}")
    given = {id(own[name]) for name in weights}
    if missing := [name for name, tensor in own.items() if id(tensor) not in given]:
        raise ValueError(f"missing weights: {', '.join(missing)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name} is {list(tensor.shape)}; this model's is {list(own[name].shape)}")
            own[name].copy_(tensor)


def export(
    directory: Path, model: Model, weights: dict[str, Tensor], vocabulary: Path, served: dict[str, Any] | None = None
) -> None:
    """Each file appears whole or not at all, so that a converter may read while training goes on."""
    directory.mkdir(parents=True, exist_ok=True)
    model_type = next(kind.model_type for kind in KINDS.values() if isinstance(model, kind.module))
    described = {"model_type": model_type, **model.config.to_json(), **(served or {})}
    for name in (VOCABULARY, CONFIG, WEIGHTS):
        partial = directory / f"{name}.tmp"
        if name == VOCABULARY:
            shutil.copyfile(vocabulary, partial)
        elif name == CONFIG:
            partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        else:
            save_file({key: tensor.contiguous() for key, tensor in weights.items()}, partial)
        partial.replace(directory / name)


def load(directory: Path) -> Model:
    described = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    kinds = {kind.model_type: kind for kind in reversed(KINDS.values())}  # a stored config has every field: no gnmt
    kind = kinds.get(described.pop("model_type", ""))
    if kind is None:
        raise ValueError(f"{directory / CONFIG}: model_type must be one of {', '.join(kinds)}")
    architecture = {name: value for name, value in described.items() if name not in SERVED}
    model = kind.module(kind.config(**architecture))
    load_weights(model, load_file(directory / WEIGHTS))
    return model
