"""The family of docs/add-a-family.md: checkpoints that `plain.py` writes -> our decoder-only Transformer.

In the project this would be converters/families/towns.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.checkpoints.files import fill, read_json, read_weights
from beamline.converters.checkpoints.tokenizers import read_tokenizer
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    DecoderOnlyConfig,
    FeedForwardConfig,
    StackConfig,
    uneven_heads,
)
from beamline.converters.modules.transformer.decoder_only import DecoderOnlyTransformer
from beamline.converters.modules.transformer.steps import DecoderOnlySteps
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import DecodingDefaults, Limits, Vocabulary
from beamline.serving.errors import UnsupportedCheckpoint
from examples.toy_family.plain import TownModel

_NUMBERS = ("letters", "width", "heads", "layers", "longest")
_END = 0
# Their names in a layer -> ours. Queries, keys and values are one matrix of ours, and not in the list.
_LAYER = {
    "before_attention": "attention_norm",
    "out": "attention.output",
    "before_mlp": "feed_forward_norm",
    "up": "feed_forward.inner",
    "down": "feed_forward.outer",
}


class TownsConverter(GenerationConverter):
    family = "towns"
    model_types: ClassVar[tuple[str, ...]] = ("towns",)
    description = "names of towns, letter by letter: the example of docs/add-a-family.md"

    def load(self) -> LoadedModel:
        content = read_json(self.source / "config.json")
        reasons = unsupported(content)
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)
        tensors = read_weights(self.source)
        original = TownModel(**{name: content[name] for name in _NUMBERS})
        fill(original, tensors, str(self.source))  # what is missing, left over or of another shape is named
        model = DecoderOnlyTransformer(architecture(content))
        fill(model, map_weights(tensors, content["layers"]), str(self.source))
        size, longest = content["letters"], content["longest"]
        tokenizer = read_tokenizer(self.source / "tokenizer.json")
        return LoadedModel(
            model=DecoderOnlySteps(model.eval()),
            original=original.eval(),
            source_tokenizer=tokenizer,
            target_tokenizer=tokenizer,
            vocabulary=Vocabulary(
                source_size=size, target_size=size, pad_id=_END, eos_ids=(_END,), decoder_start_id=_END
            ),
            limits=Limits(max_source_length=longest - 1, max_target_length=longest, max_beam_size=4),
            defaults=DecodingDefaults(beam_size=1, max_length=longest, temperature=1.0),
            description="Makes up names of towns.",
        )


def unsupported(content: Mapping[str, Any]) -> list[str]:
    """Every reason in the configuration, before a weight is read."""
    reasons = [
        f"config.json: {name} is {content.get(name)!r}; it must be a number above 0"
        for name in _NUMBERS
        if not isinstance(content.get(name), int) or content[name] < 1
    ]
    return reasons or [*uneven_heads(content["width"], content["heads"]), *architecture(content).problems()]


def architecture(content: Mapping[str, Any]) -> DecoderOnlyConfig:
    width = content["width"]
    decoder = StackConfig(
        vocab_size=content["letters"],
        d_model=width,
        layers=content["layers"],
        attention=AttentionConfig.even(width, content["heads"]),
        feed_forward=FeedForwardConfig(4 * width, "relu"),
        positions="learned",
        max_positions=content["longest"],
    )
    return DecoderOnlyConfig(decoder, tie_output=False, output_bias=True)


def map_weights(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Their tensors by our names."""
    mapped = {
        "embedding.tokens.weight": tensors["letters.weight"],
        "embedding.table": tensors["places.weight"],
        "norm.weight": tensors["last_norm.weight"],
        "norm.bias": tensors["last_norm.bias"],
        "output.weight": tensors["head.weight"],
        "output.bias": tensors["head.bias"],
    }
    for layer in range(layers):
        for kind in ("weight", "bias"):
            theirs = {name: tensors[f"layers.{layer}.{name}.{kind}"] for name in (*_LAYER, "q", "k", "v")}
            mapped[f"decoder.{layer}.attention.qkv.{kind}"] = torch.cat([theirs[name] for name in "qkv"])
            mapped |= {f"decoder.{layer}.{ours}.{kind}": theirs[name] for name, ours in _LAYER.items()}
    return mapped
