"""A small decoder-only Transformer with random weights, exported for our engine; and the plain model beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.export import EXAMPLE, TracedGraph, _example, _step
from beamline.converters.modules.graphs import SearchConstants, StepGraph
from beamline.converters.modules.search.tree import Tree, append
from beamline.converters.version.weights import WEIGHTS_FILE, WeightStore, sha256_of
from beamline.serving.contract.manifest import (
    DecodingDefaults,
    File,
    Graphs,
    Limits,
    Manifest,
    StateKind,
    StateTensor,
    Tokenizers,
    Vocabulary,
    Weights,
    read_manifest,
)
from tests.support.fixture_cache import fixture_cache

VOCABULARY, PAD, BOS, EOS = 259, 0, 1, 2  # the bytes of `serving/text/token_bytes.py`
CONTEXT = 512
LAYERS, HEADS, WIDTH = 2, 2, 32
NAME = "tiny-lm"
NO_FILE = File(file="none", sha256="")
EXAMPLE.setdefault("Q", 9)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        """[B, Q, d] -> query, key, value [B, H, Q, D]"""
        parts = self.project(self.norm(x)).chunk(3, -1)
        return [part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in parts]

    def join(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second_norm(x))))  # type: ignore[no-any-return]


class TinyLM(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
            self.output.weight.mul_(1.5)
            self.output.bias.zero_()
            self.output.bias[EOS] = 2.0
            self.output.bias[PAD] = self.output.bias[BOS] = -9.0

    def state_tensors(self) -> list[StateTensor]:
        return [
            StateTensor(
                name=f"cache_{part}_{layer}",
                kind=StateKind.CACHE,
                dtype="float32",
                shape=("B", HEADS, "C", WIDTH // HEADS),
            )
            for layer in range(LAYERS)
            for part in ("key", "value")
        ]

    def run(
        self, tokens: Tensor, places: Tensor, mask: Tensor, write_index: Tensor, caches: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.words(tokens) + self.places(places)
        new: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            query, key, value = layer.heads(x)
            key = append(caches[2 * number], key, write_index)
            value = append(caches[2 * number + 1], value, write_index)
            new += [key, value]
            x = layer.join(x, query, key, value, mask)
        return x, tuple(new)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, caches = self.run(tokens, positions[:, None], tree.mask, tree.write_index, states)
        return self.output(self.norm(x)), caches

    def forward(self, target: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V], all at once."""
        length = target.shape[1]
        x = self.words(target) + self.places(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            query, key, value = layer.heads(x)
            x = layer.join(x, query, key, value, mask)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


class Prefill(nn.Module):
    def __init__(self, model: TinyLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, positions: Tensor, write_index: Tensor, visible: Tensor, caches: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        # Padding may stand behind the last place that there is.
        places = (positions[:, None] + torch.arange(tokens.shape[1])).clamp(max=CONTEXT - 1)
        return self.model.run(tokens, places, visible[:, None], write_index, caches)[1]


class Score(nn.Module):
    def __init__(self, model: TinyLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, labels: Tensor) -> Tensor:
        return self.model(target).log_softmax(-1).gather(2, labels[:, :, None]).squeeze(2)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TinyModel:
    original: TinyLM
    folder: Path
    manifest: Manifest


def exported_tiny_lm(folder: Path) -> TinyModel:
    fixture_cache().fill(folder, export_tiny_lm)
    version = folder / NAME / "1"
    return TinyModel(TinyLM().eval(), version, read_manifest(version))


def export_tiny_lm(repository: Path) -> None:
    folder = repository / NAME / "1"
    folder.mkdir(parents=True)
    model = TinyLM().eval()
    tensors = model.state_tensors()
    caches = tuple(_example(tensor.dtype, tensor.shape) for tensor in tensors)
    axes = [("B", "Q"), ("B",), ("B",), ("B", "Q", "C")]
    kinds = ("int64", "int64", "int64", "bool")
    prefill_inputs = (*(_example(kind, axis) for kind, axis in zip(kinds, axes, strict=True)), caches)
    names = [tensor.name for tensor in tensors]
    exported = {
        "step": _step(StepGraph(cast(Any, model), SearchConstants((EOS,), 2, renormalise=False)), tensors),
        "prefill": TracedGraph(
            Prefill(model),
            prefill_inputs,
            ["tokens", "positions", "write_index", "visible", *names],
            [tensor.output for tensor in tensors],
            [*axes, tuple(tensor.shape for tensor in tensors)],
        ),
        "score": TracedGraph(
            Score(model),
            (_example("int64", ("B", "T")), _example("int64", ("B", "T"))),
            ["target", "labels"],
            ["token_log_probs"],
            [("B", "T"), ("B", "T")],
        ),
    }
    files = {}
    with (folder / WEIGHTS_FILE).open("wb") as file:
        store = WeightStore(file)
        for name, graph in exported.items():
            program = graph.export()
            store.move_out(program)
            ir.save(program, folder / f"{name}.onnx")
            files[name] = File(file=f"{name}.onnx", sha256=sha256_of(folder / f"{name}.onnx"))
    weights = folder / WEIGHTS_FILE
    manifest = Manifest(
        name=NAME,
        version=1,
        task="generate",
        family="tiny",
        graphs=Graphs(**files),
        weights=Weights(file=weights.name, sha256=sha256_of(weights), bytes=weights.stat().st_size),
        tokenizers=Tokenizers(source=NO_FILE, target=NO_FILE),
        state=tuple(tensors),
        vocabulary=Vocabulary(
            source_size=VOCABULARY, target_size=VOCABULARY, pad_id=PAD, eos_ids=(EOS,), decoder_start_id=BOS
        ),
        limits=Limits(max_source_length=CONTEXT - 1, max_target_length=CONTEXT, max_beam_size=8),
        defaults=DecodingDefaults(beam_size=1, max_length=CONTEXT, max_new_tokens=64),
    )
    (folder / "manifest.json").write_text(manifest.to_json())
