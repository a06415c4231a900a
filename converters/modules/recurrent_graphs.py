"""The recurrent encoder-decoder as an `EncoderDecoder`.

Its encoder layers become ONNX's own RNN, LSTM and GRU operators, which take each row's length: no packed sequences, and
padding changes nothing. Coupled gates need no operator of their own: the input gate 1 - sigmoid(a) is sigmoid(-a), a
gate with the forget gate's weights negated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from converters.modules.recurrent import Memory, Recurrent
from converters.modules.recurrent_cells import Cell, EncoderLayer, State
from converters.modules.tree import Tree
from serving.manifest import StateKind, StateTensor

OPERATORS = {"rnn_tanh": "RNN", "rnn_relu": "RNN", "lstm": "LSTM", "gru": "GRU"}
VERSION = 22  # of these operators, in opset 24


def onnx_order(cell: Cell, tensor: Tensor) -> Tensor:
    """A weight or bias [G * w, ...] with its gates as ONNX has them: lstm i o f g, gru z r n."""
    if cell.kind == "gru":
        reset, update, new = tensor.chunk(3)
        return torch.cat([update, reset, new])
    if cell.kind != "lstm":
        return tensor
    *take_in, forget, new, out = tensor.chunk(3 if cell.coupled else 4)
    return torch.cat([take_in[0] if take_in else -forget, out, forget, new])


def onnx_peephole(cell: Cell) -> Tensor:
    """[3 * w], gates i o f."""
    assert cell.peephole is not None
    *take_in, forget, out = cell.peephole.unbind()
    return torch.cat([take_in[0] if take_in else -forget, out, forget])


class OnnxLayer(nn.Module):
    """An encoder layer as one operator; its weights are taken as they are now."""

    weight: Tensor  # [D, G * w, inputs]
    recurrence: Tensor  # [D, G * w, w]
    bias: Tensor  # [D, 2 * G * w]
    peephole: Tensor | None  # [D, 3 * w]

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        cells = layer.directions
        self.kind, self.width, self.count = cells[0].kind, cells[0].width, len(cells)

        def keep(name: str, parts: list[Tensor]) -> None:
            self.register_buffer(name, torch.stack(parts).detach().clone(), persistent=False)

        keep("weight", [onnx_order(cell, cell.weight_ih) for cell in cells])
        keep("recurrence", [onnx_order(cell, cell.weight_hh) for cell in cells])
        keep("bias", [torch.cat([onnx_order(cell, bias) for bias in (cell.bias_ih, cell.bias_hh)]) for cell in cells])
        if cells[0].peephole is None:
            self.peephole = None
        else:
            keep("peephole", [onnx_peephole(cell) for cell in cells])

    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {"hidden_size": self.width}
        found["direction"] = "bidirectional" if self.count == 2 else "forward"
        if self.kind == "gru":
            found["linear_before_reset"] = 1
        elif self.kind.startswith("rnn"):
            found["activations"] = ["Relu" if self.kind == "rnn_relu" else "Tanh"] * self.count
        return found

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """As `EncoderLayer.forward`, in a graph only."""
        batch, length = x.shape[:2]
        states = 2 if self.kind == "lstm" else 1
        inputs = (x.transpose(0, 1), self.weight, self.recurrence, self.bias, lengths.to(torch.int32))
        outputs, *last = torch.onnx.ops.symbolic_multi_out(
            OPERATORS[self.kind],
            inputs if self.peephole is None else (*inputs, None, None, self.peephole),
            self.attributes(),
            dtypes=[x.dtype] * (1 + states),
            shapes=[(length, self.count, batch, self.width), *[(self.count, batch, self.width)] * states],
            version=VERSION,
        )
        return outputs.permute(2, 0, 1, 3), tuple(state.transpose(0, 1) for state in last)


class RecurrentSteps(nn.Module):
    def __init__(self, model: Recurrent) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(OnnxLayer(layer) for layer in model.encoder if isinstance(layer, EncoderLayer))

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
