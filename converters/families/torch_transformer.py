"""Any model built on `torch.nn.Transformer`, through a small config that names its parts.

    {
      "family": "torch_transformer",
      "weights": "model.safetensors",          or .npz, .pt, .pth; may be left out where there is only one
      "tokenizer": "spm.model",                or a tokenizer.json
      "transformer": "t",                      where the nn.Transformer is in the state dict
      "source_embedding": "e.weight",
      "target_embedding": "e.weight",
      "output": "e.weight",                    the same tensor as the target embedding: tied
      "heads": 4,
      "norm_first": true,
      "activation": "relu",
      "positions": "sinusoidal",               or "sinusoidal_halves", or "learned" with the two names below
      "max_positions": 256,
      "scale_embedding": true,
      "pad_id": 0, "eos_id": 3, "decoder_start_id": 2,
      "source_eos": true                       whether the source ends with the end token
    }

Sinusoidal positions that a module keeps as a buffer may be among the weights; they are compared with the formula.

Optional: "output_bias", "source_positions", "target_positions", "layer_norm_eps", "decoding" (decoding defaults),
"source_language", "target_language", "description". Widths and depths are read off the weights.

A model with two embeddings may have two vocabularies, and nothing in its weights says which is whose. Such a file has
neither "tokenizer" nor a default for it, but

      "source_tokenizer": "source.json", "target_tokenizer": "target.json",       the same file twice: one vocabulary
      "source_example": {"text": "Save the file.", "ids": [17, 4, 92, 3]},        all that the encoder reads
      "target_example": {"text": "Sichern.", "ids": [40, 8]}                      the words alone

The examples are what the code of the training makes of two texts. A conversion whose tokenizers make something else of
them, or whose examples could not tell the two apart, is refused.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from beamline.converters.checkpoints.files import fill, named_weights, read_parts, read_weights
from beamline.converters.loaders.named_parts import EncoderDecoderParts, NamedPartsConverter
from beamline.converters.modules.transformer.embedding import sinusoidal_table
from beamline.converters.modules.transformer.reference import Transformer, TransformerConfig
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.errors import UnsupportedCheckpoint

_SAME_POSITIONS = 1e-3  # sines of large numbers differ that much by how their argument was computed


class TorchTransformerParts(EncoderDecoderParts):
    transformer: str
    source_embedding: str
    source_positions: str | None = None
    target_positions: str | None = None
    heads: int
    norm_first: bool = False
    activation: str = "relu"
    positions: str = "sinusoidal"
    scale_embedding: bool = True
    layer_norm_eps: float = 1e-5


class TorchTransformerConverter(NamedPartsConverter):
    family = "torch_transformer"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "anything built on `torch.nn.Transformer`; a file names its parts"

    def load(self) -> LoadedModel:
        parts = read_parts(TorchTransformerParts, self.config)
        tensors = read_weights(self.source, named_weights(self.source, parts.weights))
        reasons = [
            f"{self.config.name}: {name} is {tensor!r}, which the weights don't have"
            for name, tensor in _named(parts).items()
            if tensor not in tensors
        ]
        prefix = f"{parts.transformer}." if parts.transformer else ""
        if not reasons:
            tensors, reasons = _without_position_buffers(parts, tensors, prefix, self.config.name)
        if f"{prefix}encoder.layers.0.linear1.weight" not in tensors:
            reasons.append(f"{self.config.name}: there is no nn.Transformer at {parts.transformer!r}")
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)

        config = _config(parts, tensors, prefix)
        if config.problems():
            raise UnsupportedCheckpoint(str(self.source), config.problems())
        model = Transformer(config)
        fill(model, _mapped(parts, config, tensors, prefix), str(self.source))
        model.eval()
        sizes = config.source_vocab_size, config.target_vocab_size
        original = _Original(parts, config, tensors, prefix)
        return self._loaded(parts, *sizes, EncoderDecoderSteps(model), original)


def _named(parts: TorchTransformerParts) -> dict[str, str]:
    """The single tensors that the config names."""
    fields = (
        "source_embedding",
        "target_embedding",
        "output",
        "output_bias",
        "source_positions",
        "target_positions",
    )
    return {field: name for field in fields if (name := getattr(parts, field)) is not None}


def _table(tensor: Tensor) -> Tensor:
    """[positions, width], as which many modules keep [positions, 1, width] or [1, positions, width]."""
    return tensor.squeeze(1 if tensor.shape[1] == 1 else 0) if tensor.dim() == 3 else tensor


def _without_position_buffers(
    parts: TorchTransformerParts, tensors: dict[str, Tensor], prefix: str, file: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Sinusoidal positions are computed, but a module that keeps them as a buffer saves them with its weights. Such a
    table is left out if it is what `positions` says; if it isn't, that is a reason against the checkpoint."""
    if not parts.positions.startswith("sinusoidal"):
        return tensors, []
    width = tensors[parts.target_embedding].shape[1]
    others = {parts.source_embedding, parts.target_embedding, parts.output, parts.output_bias}
    tables = {
        name: table
        for name, tensor in tensors.items()
        if name not in others and not (prefix and name.startswith(prefix)) and tensor.dim() in (2, 3)
        if (table := _table(tensor)).dim() == 2 and table.shape[1] == width
    }
    reasons = []
    for name, table in tables.items():
        length = min(parts.max_positions, len(table))
        if len(table) < parts.max_positions:
            reasons.append(f"{file}: max_positions is {parts.max_positions}, but {name} has only {len(table)}")
        formula = sinusoidal_table(parts.positions, length, width)
        if not torch.allclose(table[:length], formula, rtol=0, atol=_SAME_POSITIONS):
            reasons.append(
                f"{name} is not the table of {parts.positions} positions: if it holds positions, name it as "
                'source_positions and target_positions, with "positions": "learned"'
            )
    return {name: tensor for name, tensor in tensors.items() if name not in tables}, reasons


def _depth(tensors: dict[str, Tensor], stack: str) -> int:
    pattern = re.compile(re.escape(stack) + r"\.layers\.(\d+)\.")
    return 1 + max((int(found[1]) for name in tensors if (found := pattern.match(name))), default=-1)


def _config(parts: TorchTransformerParts, tensors: dict[str, Tensor], prefix: str) -> TransformerConfig:
    source, target = tensors[parts.source_embedding], tensors[parts.target_embedding]
    return TransformerConfig(
        source_vocab_size=source.shape[0],
        target_vocab_size=target.shape[0],
        d_model=target.shape[1],
        heads=parts.heads,
        encoder_layers=_depth(tensors, f"{prefix}encoder"),
        decoder_layers=_depth(tensors, f"{prefix}decoder"),
        ffn=tensors[f"{prefix}encoder.layers.0.linear1.weight"].shape[0],
        pad_id=parts.pad_id,
        eos_id=parts.eos_id,
        decoder_start_id=parts.decoder_start_id,
        norm="pre" if parts.norm_first else "post",
        final_norm=True,
        positions=parts.positions,
        max_positions=parts.max_positions,
        activation=parts.activation,
        scale_embedding=parts.scale_embedding,
        share_embeddings=parts.source_embedding == parts.target_embedding,
        tie_output=parts.output == parts.target_embedding,
        output_bias=parts.output_bias is not None,
        norm_eps=parts.layer_norm_eps,
        dropout=0.0,
    )


@dataclass(frozen=True)
class _Rename:
    theirs: str
    ours: str


_ENCODER = (
    _Rename("self_attn.in_proj_", "attention.qkv."),
    _Rename("self_attn.out_proj.", "attention.output."),
    _Rename("linear1.", "feed_forward.inner."),
    _Rename("linear2.", "feed_forward.outer."),
    _Rename("norm1.", "attention_norm."),
    _Rename("norm2.", "feed_forward_norm."),
)
_DECODER = (
    *_ENCODER[:5],
    _Rename("multihead_attn.out_proj.", "cross_attention.output."),
    _Rename("norm2.", "cross_attention_norm."),
    _Rename("norm3.", "feed_forward_norm."),
)


def _mapped(
    parts: TorchTransformerParts, config: TransformerConfig, tensors: dict[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Their names -> ours. What has no place of ours keeps its name, so that `fill` reports it."""
    mapped = {
        "source_embedding.tokens.weight": tensors[parts.source_embedding],
        "target_embedding.tokens.weight": tensors[parts.target_embedding],
        "output.weight": tensors[parts.output],
    }
    if parts.output_bias:
        mapped["output.bias"] = tensors[parts.output_bias]
    for side, name in (("source", parts.source_positions), ("target", parts.target_positions)):
        if name and config.positions == "learned":
            mapped[f"{side}_embedding.table"] = _table(tensors[name])[: config.max_positions]
    named = set(_named(parts).values())
    for name, tensor in tensors.items():
        if name not in named:
            mapped.update(_renamed(name.removeprefix(prefix), tensor, config.d_model))
    return mapped


def _renamed(name: str, tensor: Tensor, width: int) -> dict[str, Tensor]:
    stack, _, rest = name.partition(".")
    if stack in ("encoder", "decoder") and rest.startswith("norm."):
        return {f"{stack}_{rest}": tensor}
    number, _, part = rest.removeprefix("layers.").partition(".")
    if part.startswith("multihead_attn.in_proj_"):
        kind = part.removeprefix("multihead_attn.in_proj_")
        ours = f"{stack}.{number}.cross_attention"
        return {f"{ours}.query.{kind}": tensor[:width], f"{ours}.key_value.{kind}": tensor[width:]}
    for rename in _DECODER if stack == "decoder" else _ENCODER:
        if part.startswith(rename.theirs):
            return {f"{stack}.{number}.{rename.ours}{part.removeprefix(rename.theirs)}": tensor}
    return {name: tensor}


class _Original(nn.Module):
    """The user's model as PyTorch has it, for the comparison."""

    def __init__(
        self, parts: TorchTransformerParts, config: TransformerConfig, tensors: dict[str, Tensor], prefix: str
    ) -> None:
        super().__init__()
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # a remark about speed in training
        self.transformer = nn.Transformer(
            config.d_model,
            config.heads,
            config.encoder_layers,
            config.decoder_layers,
            config.ffn,
            dropout=0.0,
            activation=getattr(nn.functional, config.activation),
            layer_norm_eps=config.norm_eps,
            batch_first=True,
            norm_first=parts.norm_first,
        )
        fill(
            self.transformer,
            {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix + "encoder.") or name.startswith(prefix + "decoder.")
            },
            "the nn.Transformer",
        )
        # Embedding and output are ours either way: nn.Transformer has none.
        reference = Transformer(config)
        fill(reference, _mapped(parts, config, tensors, prefix), "the embeddings")
        self.source_embedding = reference.source_embedding
        self.target_embedding = reference.target_embedding
        self.output = reference.output

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self.source_embedding(source, torch.arange(source.shape[1])),
            self.target_embedding(target, torch.arange(target.shape[1])),
            tgt_mask=causal,
            src_key_padding_mask=~source_mask,
            memory_key_padding_mask=~source_mask,
        )
        return self.output(hidden)  # type: ignore[no-any-return]
