"""The recurrent family once more, as plainly as possible: one sentence at a time, one word at a time, no padding.

What torch.nn has (RNN, LSTM, GRU and their cells) computes here; only peepholes are written out. Nothing is shared with
the module under test but its configuration and its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from beamline.converters.modules.recurrent.config import EncoderStack, RecurrentConfig
from beamline.converters.modules.recurrent.language_model import RecurrentLanguageConfig

Weights = Mapping[str, Tensor]


def uncoupled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """f g o -> i f g o, where i = 1 - f."""
    return {name: torch.cat([-tensor[: len(tensor) // 3], tensor]) for name, tensor in weights.items()}


def cell_weights(config: EncoderStack, weights: Weights, prefix: str) -> dict[str, Tensor]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    found = {name: weights[f"{prefix}.{name}"] for name in names}
    return uncoupled(found) if config.coupled_gates else found


def peephole_step(config: EncoderStack, weights: Weights, prefix: str, x: Tensor, h: Tensor, c: Tensor):
    w = cell_weights(config, weights, prefix)
    gates = w["weight_ih"] @ x + w["bias_ih"] + w["weight_hh"] @ h + w["bias_hh"]
    size = len(h)
    peep = weights[f"{prefix}.peephole"]
    if config.coupled_gates:
        peep = torch.stack([-peep[0], peep[0], peep[1]])
    i = torch.sigmoid(gates[:size] + peep[0] * c)
    f = torch.sigmoid(gates[size : 2 * size] + peep[1] * c)
    c = f * c + i * torch.tanh(gates[2 * size : 3 * size])
    o = torch.sigmoid(gates[3 * size :] + peep[2] * c)
    return o * torch.tanh(c), c


def run_layer(config: RecurrentConfig, weights: Weights, prefix: str, directions: int, x: Tensor):
    """x [S, inputs] -> outputs by direction, each [S, w], and last states by direction."""
    width = config.encoder_width
    if config.peepholes:
        outputs, last = [], []
        for number in range(directions):
            h = c = torch.zeros(width)
            collected = {}
            for place in reversed(range(len(x))) if number else range(len(x)):
                h, c = peephole_step(config, weights, f"{prefix}.cells.{number}", x[place], h, c)
                collected[place] = h
            outputs.append(torch.stack([collected[place] for place in range(len(x))]))
            last.append((h, c))
        return outputs, last
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}.get(config.cell, nn.RNN)
    extra = {"nonlinearity": config.cell.removeprefix("rnn_")} if kind is nn.RNN else {}
    theirs = kind(x.shape[1], width, bidirectional=directions == 2, **extra)
    theirs.load_state_dict(
        {
            f"{name}_l0{'_reverse' if number else ''}": tensor
            for number in range(directions)
            for name, tensor in cell_weights(config, weights, f"{prefix}.cells.{number}").items()
        }
    )
    found, state = theirs(x)
    states = state if isinstance(state, tuple) else (state,)
    return list(found.split(width, dim=1)), [tuple(part[number] for part in states) for number in range(directions)]


def merged(config: RecurrentConfig, parts: list[Tensor]) -> Tensor:
    if config.merge == "concat":
        return torch.cat(parts, dim=-1)
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return total / len(parts) if config.merge == "mean" else total


def cell_step(config: EncoderStack, weights: Weights, prefix: str, x: Tensor, state: tuple[Tensor, ...]):
    if config.peepholes:
        return peephole_step(config, weights, prefix, x, *state)
    width = len(state[0])
    if config.cell == "lstm":
        theirs: nn.RNNCellBase = nn.LSTMCell(len(x), width)
    elif config.cell == "gru":
        theirs = nn.GRUCell(len(x), width)
    else:
        theirs = nn.RNNCell(len(x), width, nonlinearity=config.cell.removeprefix("rnn_"))
    theirs.load_state_dict(cell_weights(config, weights, prefix))
    found = theirs(x, state if config.cell == "lstm" else state[0])
    return found if isinstance(found, tuple) else (found,)


def attend(config: RecurrentConfig, weights: Weights, query: Tensor, memory: Tensor, position: int):
    """query [q], memory [S, m] -> context [m], weights [S]"""
    prefix, count = "decoder.attention", len(memory)
    if config.attention == "additive":
        asked = weights[f"{prefix}.query.weight"] @ query + weights[f"{prefix}.query.bias"]
        scores = [
            weights[f"{prefix}.energy.weight"][0] @ torch.tanh(asked + weights[f"{prefix}.key.weight"] @ value)
            for value in memory
        ]
    elif config.attention == "general":
        scores = [query @ weights[f"{prefix}.key.weight"] @ value for value in memory]
    else:
        scale = math.sqrt(len(query)) if config.attention == "scaled_dot" else 1.0
        scores = [query @ value / scale for value in memory]
    seen, bell = list(range(count)), torch.ones(count)
    if config.window == "monotonic":
        centre = min(position, count - 1)
        seen = [place for place in seen if abs(place - centre) <= config.window_radius]
    elif config.window == "predictive":
        hidden = torch.tanh(weights[f"{prefix}.place.weight"] @ query)
        where = count * torch.sigmoid(weights[f"{prefix}.place_energy.weight"][0] @ hidden)
        seen = [place for place in seen if abs(place - where) <= config.window_radius]
        deviation = config.window_radius / 2
        bell = torch.exp(-((torch.arange(count) - where) ** 2) / (2 * deviation**2))
    paid = torch.zeros(count)
    paid[seen] = torch.stack([scores[place] for place in seen]).softmax(0)
    paid = paid * bell
    return paid @ memory, paid


@torch.no_grad()
def plain_logits(config: RecurrentConfig, weights: Weights, source: list[int], target: list[int]):
    """[T, V] and the attention [T, S], or None."""
    words = source[::-1] if config.reverse_source else source
    table = weights["target_embedding.weight" if config.share_embeddings else "source_embedding.weight"]
    x, ends = table[words], []
    for layer in range(config.encoder_layers):
        outputs, last = run_layer(config, weights, f"encoder.{layer}", config.directions(layer), x)
        ends.append([merged(config, [direction[part] for direction in last]) for part in range(len(last[0]))])
        added = config.residual_from is not None and layer >= config.residual_from
        x = merged(config, outputs) + x if added else merged(config, outputs)
    memory = x.flip(0) if config.reverse_source else x

    states, per_layer = [], len(ends[0])
    for layer in range(config.decoder_layers):
        origin = ends[layer if config.bridge_from == "each" else -1]
        for part in range(per_layer):
            if config.bridge == "zero":
                states.append(torch.zeros(config.decoder_width))
            elif config.bridge == "copy":
                states.append(origin[part])
            else:
                name = f"bridge.projections.{layer * per_layer + part}"
                state = weights[f"{name}.weight"] @ origin[part] + weights[f"{name}.bias"]
                states.append(torch.tanh(state) if config.bridge == "tanh" else state)

    asks = 0 if config.attention_layer == "bottom" else config.decoder_layers - 1
    fed: Tensor | None = None
    rows, alignment = [], []
    for position, word in enumerate(target):
        embedded = weights["target_embedding.weight"][word]
        context = ends[-1][0] if config.fixed_context else None
        if config.attention != "none" and config.attention_order == "previous":
            context, paid = attend(config, weights, states[asks * per_layer], memory, position)
        x = embedded
        for layer in range(config.decoder_layers):
            inputs = [x]
            if layer == 0 and config.input_feeding:
                width = len(memory[0]) if config.readout == "none" else config.readout_width
                inputs.append(torch.zeros(width) if fed is None else fed)
            if context is not None and (layer == 0 or config.context_to == "all"):
                inputs.append(context)
            own = slice(layer * per_layer, (layer + 1) * per_layer)
            new = cell_step(config, weights, f"decoder.cells.{layer}", torch.cat(inputs), tuple(states[own]))
            states[own] = list(new)
            added = config.residual_from is not None and layer >= config.residual_from
            x = new[0] + x if added else new[0]
            if config.attention != "none" and config.attention_order == "new" and layer == asks:
                context, paid = attend(config, weights, x, memory, position)
        found = [x]
        if context is not None and config.readout_context:
            found.append(context)
        if config.readout_embedding:
            found.append(embedded)
        hidden = torch.cat(found)
        if config.readout != "none":
            hidden = weights["decoder.readout.weight"] @ hidden + weights["decoder.readout.bias"]
            hidden = torch.tanh(hidden) if config.readout == "tanh" else hidden
        fed = context if config.readout == "none" else hidden
        output = weights["target_embedding.weight" if config.tie_output else "output.weight"]
        logits = output @ hidden
        rows.append(logits + weights["output.bias"] if config.output_bias else logits)
        if config.attention != "none":
            alignment.append(paid)
    return torch.stack(rows), torch.stack(alignment) if alignment else None


def plain_language_logits(config: RecurrentLanguageConfig, weights: Weights, text: list[int]) -> Tensor:
    """[T, V]: what a language model says after each word of a text."""
    zeros = (torch.zeros(config.width),) * (2 if config.cell == "lstm" else 1)
    states, rows = [zeros] * config.layers, []
    for word in text:
        x = weights["embedding.weight"][word]
        for layer in range(config.layers):
            states[layer] = cell_step(config, weights, f"layers.{layer}.cells.0", x, states[layer])
            added = config.residual_from is not None and layer >= config.residual_from
            x = states[layer][0] + x if added else states[layer][0]
        logits = weights["embedding.weight" if config.tie_output else "output.weight"] @ x
        rows.append(logits + weights["output.bias"] if config.output_bias else logits)
    return torch.stack(rows)
