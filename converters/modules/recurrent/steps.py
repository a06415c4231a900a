"""The recurrent encoder-decoder as an `EncoderDecoder`. Its encoder layers become ONNX's own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beamline.converters.modules.recurrent.cells import EncoderLayer
from beamline.converters.modules.recurrent.encoder_decoder import Memory, Recurrent
from beamline.converters.modules.recurrent.onnx_operators import OnnxLayer
from beamline.converters.modules.search.tree import Tree
from beamline.serving.contract.manifest import StateKind, StateTensor


class RecurrentSteps(nn.Module):
    def __init__(self, model: Recurrent) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(OnnxLayer(layer) for layer in model.encoder if isinstance(layer, EncoderLayer))

    @property
    def feature_width(self) -> int:
        return self.model.config.source_features

    def state_tensors(self) -> list[StateTensor]:
        config, attention = self.model.config, self.model.decoder.attention

        def of_request(name: str, *shape: Any, dtype: Any = "float32") -> StateTensor:
            return StateTensor(name=name, kind=StateKind.MEMORY, dtype=dtype, shape=("B", *shape))

        def of_beam(name: str, width: int) -> StateTensor:
            return StateTensor(name=name, kind=StateKind.RECURRENT, dtype="float32", shape=("B", "K", width))

        tensors = []
        if attention is not None:
            tensors += [of_request("source_mask", "S", dtype="bool"), of_request("values", "S", config.memory_width)]
            if attention.projects_keys:
                width = config.attention_width if config.attention == "additive" else config.decoder_width
                tensors.append(of_request("keys", "S", width))
        elif config.fixed_context:
            tensors.append(of_request("context", config.memory_width))
        for layer in range(config.decoder_layers):
            tensors.append(of_beam(f"hidden_{layer}", config.decoder_width))
            if config.states_per_layer == 2:
                tensors.append(of_beam(f"cell_{layer}", config.decoder_width))
        if config.input_feeding:
            tensors.append(of_beam("fed", config.fed_width))
        return tensors

    def _encode(self, source: Tensor, source_mask: Tensor) -> Memory:
        if torch.onnx.is_in_onnx_export():
            return self.model.encode(source, source_mask, list(self.layers))
        return self.model.encode(source, source_mask)

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        memory = self._encode(source, source_mask)
        parts = (memory.values, memory.keys, memory.context)
        return (*(part for part in parts if part is not None), *memory.start)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        model, mask = self.model, None
        if model.decoder.attention is None:
            seen = Memory((), context=memory[0] if memory else None)
        else:
            mask, values, *keys = memory
            seen = Memory((), values, keys[0] if keys else None)
        embedded = model.target_embedding(tokens)
        advanced = model.decoder.advance(embedded, positions, seen, mask, states)
        return model.output(model.decoder.finish(advanced.features)), advanced.states

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden, attention = self.model.decode(self._encode(source, source_mask), source_mask, target, attention_of=0)
        assert attention is not None
        return self.model.output(hidden), attention
