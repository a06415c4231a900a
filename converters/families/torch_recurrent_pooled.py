"""Any classifier or embedder built on `torch.nn.RNN`, `LSTM` or `GRU`, through a small config that names its parts.

    {
      "family": "torch_recurrent_pooled",
      "weights": "model.safetensors",          or .npz, .pt, .pth; may be left out where there is only one
      "tokenizer": "spm.model",           or a tokenizer.json
      "embedding": "embedding.weight",
      "encoder": "lstm",                  where the nn.LSTM (or RNN, GRU) is in the state dict
      "pooling": "attention",             or "last", "mean", "max"
      "query": "attention.query",         of attention pooling: a vector, or an nn.Linear of one row without a bias
      "query_projection": "attention.w",  an nn.Linear with tanh before it, where there is one
      "head": "fc1",                      an nn.Linear with ReLU before the output, where there is one
      "output": "fc2",                    an nn.Linear; none: the model only embeds
      "labels": ["negative", "positive"],
      "pad_id": 0,
      "max_positions": 256
    }

Optional: "multi_label", "nonlinearity" (of an nn.RNN), "merge", "reverse_source", "normalize", "source_eos" and
"description". `PooledConfig` says what they mean. Widths, depth and directions are read off the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from beamline.converters.checkpoints.files import fill, named_weights, read_parts, read_weights
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import read_tokenizer
from beamline.converters.loaders.pooled_settings import pooled_settings
from beamline.converters.loaders.torch_recurrent_original import Linear, Stack
from beamline.converters.loaders.torch_recurrent_state_dict import NamedTensors
from beamline.converters.modules.recurrent.pooled import PooledConfig, PooledGraph, RecurrentPooled
from beamline.converters.tasks.pooling import LoadedPooledModel, PoolingConverter
from beamline.serving.errors import UnsupportedCheckpoint


class TorchRecurrentPooledParts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    family: str
    weights: str | None = None
    tokenizer: str = "spm.model"
    embedding: str
    encoder: str
    pooling: str = "last"
    query: str | None = None
    query_projection: str | None = None
    head: str | None = None
    output: str | None = None
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    merge: str = "concat"
    reverse_source: bool = False
    normalize: bool = False
    pad_id: int
    max_positions: int
    source_eos: bool = True
    description: str = ""


class TorchRecurrentPooledConverter(PoolingConverter):
    family = "torch_recurrent_pooled"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "classifiers and embedders on `torch.nn.RNN`, `LSTM` or `GRU`; a file names their parts"

    def __init__(self, source: Path, config: Path) -> None:
        super().__init__(source)
        self.config = config

    @classmethod
    def from_source(cls, source: Source) -> Self:
        return cls(source.path, source.config_file)

    def load(self) -> LoadedPooledModel:
        parts = read_parts(TorchRecurrentPooledParts, self.config)
        found = NamedTensors(read_weights(self.source, named_weights(self.source, parts.weights)), self.config.name)
        embedding = found.tensor("embedding", parts.embedding)
        stack = found.stack("encoder", parts.encoder, parts.nonlinearity)
        fields = ("query", "query_projection", "head", "output")
        linears = {field: found.linear(field, name) for field in fields if (name := getattr(parts, field)) is not None}
        self._check(parts, found, linears)
        config = _config(parts, embedding, stack, linears)
        if config.problems():
            raise UnsupportedCheckpoint(str(self.source), config.problems())
        model = RecurrentPooled(config)
        mapped = _mapped(found, embedding, stack, linears)
        fill(model, mapped, str(self.source), found.names_of(mapped))
        model.eval()
        graph = PooledGraph(model)
        return LoadedPooledModel(
            graph=graph,
            outputs=graph.names,
            original=_Original(config, embedding, stack, linears).eval(),
            tokenizer=read_tokenizer(self.source / parts.tokenizer, add_eos=parts.source_eos),
            settings=pooled_settings(config, parts.description),
        )

    def _check(self, parts: TorchRecurrentPooledParts, found: NamedTensors, linears: dict[str, Linear]) -> None:
        reasons, file = list(found.reasons), self.config.name
        if parts.pooling == "attention" and parts.query is None:
            reasons.append(f"{file}: query is missing")
        if parts.query_projection and not parts.query:
            reasons.append(f"{file}: query_projection needs a query")
        if "query" in linears and linears["query"].bias is not None:
            reasons.append(f"{file}: query has a bias, which is not supported")
        if parts.head and not parts.output:
            reasons.append(f"{file}: head needs an output")
        rows = len(linears["output"].weight) if "output" in linears else 0
        if not found.reasons and rows != len(parts.labels):
            reasons.append(f"{file}: labels has {len(parts.labels)} names, but the output {rows} rows")
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)


def _config(
    parts: TorchRecurrentPooledParts, embedding: Tensor, stack: Stack, linears: dict[str, Linear]
) -> PooledConfig:
    return PooledConfig(
        vocab_size=embedding.shape[0],
        embedding_width=embedding.shape[1],
        encoder_width=stack.width,
        encoder_layers=stack.depth,
        pad_id=parts.pad_id,
        labels=parts.labels,
        multi_label=parts.multi_label,
        pooling=parts.pooling,
        attention="query" in linears,
        attention_width=len(linears["query_projection"].weight) if "query_projection" in linears else 0,
        head_width=len(linears["head"].weight) if "head" in linears else 0,
        cell=stack.cell,
        bidirectional="all" if stack.directions == 2 else "none",
        merge=parts.merge,
        reverse_source=parts.reverse_source,
        max_positions=parts.max_positions,
        normalize=parts.normalize,
        dropout=0.0,
    )


def _mapped(found: NamedTensors, embedding: Tensor, stack: Stack, linears: dict[str, Linear]) -> dict[str, Tensor]:
    """Their names -> ours. What has no place of ours keeps its name, so that `fill` reports it."""
    mapped = found.unused()
    mapped["embedding.weight"] = embedding
    for (layer, way), weights in stack.layers.items():
        mapped |= {f"encoder.{layer}.cells.{way}.{part}": tensor for part, tensor in weights.items()}
    if "query" in linears:
        mapped["pooling.query"] = linears["query"].weight[0]
    for field, name in (("query_projection", "pooling.projection"), ("head", "head"), ("output", "output")):
        if field in linears:
            mapped[f"{name}.weight"], mapped[f"{name}.bias"] = linears[field].weight, linears[field].bias_or_zero
    return mapped


class _Original(nn.Module):
    """The user's model as PyTorch has it: torch.nn's layers over packed sequences, and plain products."""

    def __init__(self, config: PooledConfig, embedding: Tensor, stack: Stack, linears: dict[str, Linear]) -> None:
        super().__init__()
        self.config, self.embedding, self.linears = config, embedding, linears
        self.encoder = stack.module()

    def forward(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        """Of sources without padding."""
        words = source.flip(1) if self.config.reverse_source else source
        lengths = source_mask.sum(1)
        packed = pack_padded_sequence(self.embedding[words], lengths, batch_first=True, enforce_sorted=False)
        outputs, state = self.encoder(packed)
        states, _ = pad_packed_sequence(outputs, batch_first=True)
        hidden = state[0] if isinstance(state, tuple) else state
        top = hidden[-2:] if self.encoder.bidirectional else hidden[-1:]
        states, last = self._merged(states), self._merged(torch.cat(list(top), dim=-1))
        vectors = {"last": last, "mean": states.mean(1), "max": states.max(1).values}
        if "query" in self.linears:
            seen = states
            if "query_projection" in self.linears:
                seen = self.linears["query_projection"](states).tanh()
            weights = (seen @ self.linears["query"].weight[0]).softmax(1)
            vectors["attention"] = torch.einsum("bs,bsm->bm", weights, states)
        found = {f"vector_{how}": vectors[how] for how in self.config.poolings}
        if "output" in self.linears:
            vector = vectors[self.config.pooling]
            if "head" in self.linears:
                vector = self.linears["head"](vector).relu()
            logits = self.linears["output"](vector)
            found["probabilities"] = logits.sigmoid() if self.config.multi_label else logits.softmax(1)
        return found

    def _merged(self, x: Tensor) -> Tensor:
        if self.config.merge == "concat" or not self.encoder.bidirectional:
            return x
        forwards, backwards = x.chunk(2, dim=-1)
        return forwards + backwards if self.config.merge == "sum" else (forwards + backwards) / 2
