"""Tiny checkpoints with random weights: our own, and one built on `torch.nn.Transformer` as a user might have it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn

from beamline.converters.families import converter_for
from beamline.converters.modules.transformer.reference import Transformer, TransformerConfig
from tests.support.marian import train_sentencepiece
from tests.support.text import english_lines

PAD, START, EOS = 0, 2, 3
MAX_POSITIONS = 40


@cache
def sentencepiece_model() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = train_sentencepiece(
            Path(folder) / "spm.model",
            english_lines()[:300],
            vocab_size=120,
            pad_id=PAD,
            unk_id=1,
            bos_id=START,
            eos_id=EOS,
        )
        return path.read_bytes()


@cache
def vocabulary_size() -> int:
    return int(SentencePieceProcessor(model_proto=sentencepiece_model()).get_piece_size())


def randomise(model: nn.Module, seed: int = 0) -> None:
    """All of it, norms and biases too: a converter must not lose or swap any."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2 if parameter.dim() > 1 else 0.1, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)


# -- ours ------------------------------------------------------------------------------------------------------------


def reference_config(vocabulary: int | None = None, **changes: Any) -> TransformerConfig:
    size = vocabulary or vocabulary_size()
    config = TransformerConfig(
        source_vocab_size=size,
        target_vocab_size=size,
        d_model=16,
        heads=2,
        encoder_layers=1,
        decoder_layers=1,
        ffn=24,
        pad_id=PAD,
        eos_id=EOS,
        decoder_start_id=START,
        max_positions=MAX_POSITIONS,
    )
    return replace(config, **changes)


def reference_model(config: TransformerConfig, seed: int = 0) -> Transformer:
    model = Transformer(config).eval()
    randomise(model, seed)
    return model


def write_reference(folder: Path, *, beside: dict[str, Any] | None = None, **changes: Any) -> Path:
    """`beside` goes into config.json next to the architecture."""
    folder.mkdir(parents=True, exist_ok=True)
    config = reference_config(**changes)
    model = reference_model(config)
    content = {"model_type": "beamline_transformer", **config.to_json(), **(beside or {})}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(_stored_once(model), folder / "model.safetensors")
    (folder / "spm.model").write_bytes(sentencepiece_model())
    return folder


def write_reference_source(folder: Path) -> Path:
    """The checkpoint that most tests of conversions begin with."""
    return write_reference(folder, norm="pre", beside={"source_language": "en"})


def convert_reference_source(repository: Path) -> None:
    """It as version 1 of `reference`."""
    with tempfile.TemporaryDirectory() as folder:
        converter_for(write_reference_source(Path(folder))).convert("reference", repository)


def _stored_once(model: nn.Module) -> dict[str, Tensor]:
    """As safetensors wants it: what is tied, under one of its names."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# -- torch.nn.Transformer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchShape:
    norm_first: bool = False
    activation: str = "relu"
    positions: str = "sinusoidal"
    shared: bool = True  # source and target embeddings
    tied: bool = True  # target embedding and output
    output_bias: bool = False
    scale_embedding: bool = True
    layers: int = 1

    @property
    def name(self) -> str:
        norm = "pre" if self.norm_first else "post"
        sharing = f"{'shared' if self.shared else 'apart'}-{'tied' if self.tied else 'untied'}"
        return f"{norm}-{self.activation}-{self.positions}-{sharing}"


def all_torch_shapes() -> Iterator[TorchShape]:
    grid = product(
        (False, True),
        ("relu", "gelu", "silu"),
        ("sinusoidal", "sinusoidal_halves", "learned"),
        (True, False),
        (True, False),
    )
    for number, (norm_first, activation, positions, shared, tied) in enumerate(grid):
        yield TorchShape(
            norm_first,
            activation,
            positions,
            shared,
            tied,
            output_bias=number % 3 == 0,
            scale_embedding=number % 2 == 0,
            layers=1 + number % 2,
        )


class TorchModel(nn.Module):
    """What a user's training script has; nothing of it is ours."""

    WIDTH, HEADS, FFN = 16, 4, 24

    def __init__(self, shape: TorchShape) -> None:
        super().__init__()
        self.shape = shape
        size = vocabulary_size()
        self.net = nn.Transformer(
            self.WIDTH,
            self.HEADS,
            shape.layers,
            shape.layers,
            self.FFN,
            dropout=0.0,
            activation=getattr(nn.functional, shape.activation),
            batch_first=True,
            norm_first=shape.norm_first,
        )
        self.target = nn.Embedding(size, self.WIDTH)
        self.source = self.target if shape.shared else nn.Embedding(size, self.WIDTH)
        self.out = nn.Linear(self.WIDTH, size, bias=shape.output_bias)
        if shape.tied:
            self.out.weight = self.target.weight
        if shape.positions == "learned":
            self.source_positions = nn.Parameter(torch.empty(MAX_POSITIONS, self.WIDTH))
            self.target_positions = nn.Parameter(torch.empty(MAX_POSITIONS, self.WIDTH))

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        hidden = self.net(
            self._embed(self.source, source, "source"),
            self._embed(self.target, target, "target"),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]),
            src_key_padding_mask=~source_mask,
            memory_key_padding_mask=~source_mask,
        )
        return self.out(hidden)  # type: ignore[no-any-return]

    def _embed(self, table: nn.Embedding, tokens: Tensor, side: str) -> Tensor:
        scale = math.sqrt(self.WIDTH) if self.shape.scale_embedding else 1.0
        length = tokens.shape[1]
        if self.shape.positions == "learned":
            positions = getattr(self, f"{side}_positions")[:length]
        else:
            positions = torch.tensor([self._sinusoid(place) for place in range(length)])
        return table(tokens) * scale + positions  # type: ignore[no-any-return]

    def _sinusoid(self, place: int) -> list[float]:
        angles = [place / 10000 ** (2 * pair / self.WIDTH) for pair in range(self.WIDTH // 2)]
        if self.shape.positions == "sinusoidal_halves":
            return [*map(math.sin, angles), *map(math.cos, angles)]
        return [value for angle in angles for value in (math.sin(angle), math.cos(angle))]

    def parts(self) -> dict[str, Any]:
        """The config that names them."""
        shape = self.shape
        named: dict[str, Any] = {
            "family": "torch_transformer",
            "transformer": "net",
            "target_embedding": "target.weight",
            "source_embedding": "target.weight" if shape.shared else "source.weight",
            "output": "target.weight" if shape.tied else "out.weight",
            "heads": self.HEADS,
            "norm_first": shape.norm_first,
            "activation": shape.activation,
            "positions": shape.positions,
            "max_positions": MAX_POSITIONS,
            "scale_embedding": shape.scale_embedding,
            "pad_id": PAD,
            "eos_id": EOS,
            "decoder_start_id": START,
        }
        if shape.output_bias:
            named["output_bias"] = "out.bias"
        if shape.positions == "learned":
            named |= {"source_positions": "source_positions", "target_positions": "target_positions"}
        return named


def torch_model(shape: TorchShape, seed: int = 0) -> TorchModel:
    model = TorchModel(shape).eval()
    randomise(model, seed)
    return model


def both_sides() -> dict[str, Any]:
    """What a parts file says where two embeddings share one vocabulary."""
    text = SentencePieceProcessor(model_proto=sentencepiece_model())
    line = "Save the file."
    return {
        "source_tokenizer": "spm.model",
        "target_tokenizer": "spm.model",
        "source_example": {"text": line, "ids": text.encode(line, add_eos=True)},
        "target_example": {"text": line, "ids": text.encode(line)},
    }


def write_torch_transformer(folder: Path, model: TorchModel, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    apart = {} if model.shape.shared else both_sides()
    content = {name: value for name, value in {**model.parts(), **apart, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(_stored_once(model), folder / "model.safetensors")
    (folder / "spm.model").write_bytes(sentencepiece_model())
    return folder
