"""The state dict of a model built on `torch.nn.RNN`, `LSTM` or `GRU`: its parts by the names that a config gives, and
their place in our module. See `families/torch_recurrent.py` for the config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from beamline.converters.loaders.named_parts import EncoderDecoderParts
from beamline.converters.loaders.torch_recurrent_original import Linear, Stack
from beamline.converters.modules.recurrent.config import RecurrentConfig

_CELLS = {4: "lstm", 3: "gru"}  # by gates
_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class TorchRecurrentParts(EncoderDecoderParts):
    source_features: int = 0
    feature_projection: str | None = None
    encoder: str | None = None
    decoder: str | tuple[str, ...]
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    merge: str = "concat"
    reverse_source: bool = False
    bridge: str = "copy"
    bridge_from: str = "each"
    bridge_hidden: tuple[str, ...] = ()
    bridge_cell: tuple[str, ...] = ()
    attention: str = "none"
    attention_activation: str = "tanh"
    attention_order: str = "new"
    attention_query: str | None = None
    attention_key: str | None = None
    attention_energy: str | None = None
    attention_place: str | None = None
    attention_place_energy: str | None = None
    window: str = "all"
    window_radius: int = 0
    context_gate: str | None = None
    decoder_input: tuple[Literal["embedding", "context", "fed"], ...] = ("embedding",)
    readout: str | None = None
    readout_activation: Literal["tanh", "none"] = "tanh"
    readout_input: tuple[Literal["hidden", "context", "embedding"], ...] = ("hidden",)


class NamedTensors:
    """The tensors of a state dict, found by the names that a config gives; and every name that is not there."""

    def __init__(self, tensors: dict[str, Tensor], file: str) -> None:
        self.tensors = tensors
        self.reasons: list[str] = []
        self.used: set[str] = set()
        self._file = file

    def optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self.tensors[name]

    def unused(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.used}

    def names_of(self, mapped: dict[str, Tensor]) -> dict[str, str]:
        """What the state dict calls a tensor that was mapped as it is."""
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        return {ours: names[id(tensor)] for ours, tensor in mapped.items() if id(tensor) in names}

    def tensor(self, field: str, name: str) -> Tensor:
        if name not in self.tensors:
            self.reasons.append(f"{self._file}: {field} is {name!r}, which the weights don't have")
            return torch.zeros(1, 1)
        self.used.add(name)
        return self.tensors[name]

    def stack(self, field: str, named: str | tuple[str, ...], nonlinearity: str) -> Stack:
        """An nn.RNN, LSTM or GRU by layer and direction, or a cell of that kind, or several, one above the other."""
        layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        for prefix in (named,) if isinstance(named, str) else named:
            found = self._layers(prefix)
            if not found or any("weight_ih" not in layer or "weight_hh" not in layer for layer in found.values()):
                self.reasons.append(f"{self._file}: there is no nn.RNN, LSTM or GRU at {prefix!r}, its {field}")
            below = 1 + max((number for number, _ in layers), default=-1)
            layers |= {(below + number, way): layer for (number, way), layer in found.items()}
        if self.reasons or not layers:
            return Stack({}, "", 0, 0, 0)
        for layer in layers.values():  # bias=False
            for bias in ("bias_ih", "bias_hh"):
                layer.setdefault(bias, torch.zeros(len(layer["weight_ih"])))
        width = layers[0, 0]["weight_hh"].shape[1]
        cell = _CELLS.get(len(layers[0, 0]["weight_hh"]) // width, f"rnn_{nonlinearity}")
        depth, directions = 1 + max(number for number, _ in layers), 1 + max(way for _, way in layers)
        return Stack(layers, cell, depth, directions, width)

    def _layers(self, prefix: str) -> dict[tuple[int, int], dict[str, Tensor]]:
        start = re.escape(f"{prefix}." if prefix else "")
        layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            found = re.fullmatch(start + r"(weight_ih|weight_hh|bias_ih|bias_hh)(?:_l(\d+)(_reverse)?)?", name)
            if found:
                self.used.add(name)
                layers.setdefault((int(found[2] or 0), int(bool(found[3]))), {})[found[1]] = tensor
            elif re.fullmatch(start + r"weight_hr_l\d+(_reverse)?", name):
                self.reasons.append(f"{name}: an nn.LSTM with a projection (proj_size) is not supported")
        return layers

    def linear(self, field: str, name: str) -> Linear:
        """An nn.Linear, or a bare parameter; a vector is a matrix of one row."""
        weight = name if name in self.tensors else f"{name}.weight"
        if weight not in self.tensors:
            self.reasons.append(f"{self._file}: {field} is {name!r}, which the weights don't have")
            return Linear(torch.zeros(1, 1), None)
        bias = f"{name}.bias" if weight != name and f"{name}.bias" in self.tensors else None
        self.used.update(filter(None, (weight, bias)))
        matrix = self.tensors[weight]
        return Linear(matrix[None, :] if matrix.dim() == 1 else matrix, self.optional(bias))


class RecurrentStateDict(NamedTensors):
    """The parts of an encoder-decoder."""

    def __init__(self, parts: TorchRecurrentParts, tensors: dict[str, Tensor], file: str) -> None:
        super().__init__(tensors, file)
        self.parts = parts
        for field in ("source_embedding", "target_embedding", "output", "output_bias"):
            if (name := getattr(parts, field)) is not None:
                self.tensor(field, name)
        self.decoder = self.stack("decoder", parts.decoder, parts.nonlinearity)
        self.encoder = None if parts.encoder is None else self.stack("encoder", parts.encoder, parts.nonlinearity)
        self.linears = {field: self.linear(field, name) for field, name in self._named_linears()}
        self._check_source()
        if not self.reasons:
            self._check_stacks()

    def _check_source(self) -> None:
        """Words have an embedding and an encoder; features may go without."""
        reads, named = self.parts.source_features > 0, self.parts.source_embedding is not None
        if reads == named:
            said = "both source_embedding and source_features are given" if reads else "source_embedding is missing"
            self.reasons.append(f"{self._file}: {said}")
        if self.encoder is None and not reads:
            self.reasons.append(f"{self._file}: encoder is missing")

    def embed_source(self, source: Tensor) -> Tensor:
        """What the encoder reads, of words or features."""
        if self.parts.source_embedding is not None:
            return self.tensors[self.parts.source_embedding][source]
        return self.linears["feature_projection"](source) if "feature_projection" in self.linears else source

    def _check_stacks(self) -> None:
        encoder, decoder = self.encoder, self.decoder
        if encoder is not None and encoder.cell != decoder.cell:
            self.reasons.append(f"the encoder is of {encoder.cell} cells and the decoder of {decoder.cell}")
        if decoder.directions == 2:
            self.reasons.append("the decoder is bidirectional")
        wanted = {"bridge_hidden": self.parts.bridge in ("linear", "tanh")}
        wanted["bridge_cell"] = wanted["bridge_hidden"] and (encoder or decoder).cell == "lstm"
        for field, needed in wanted.items():
            given = len(getattr(self.parts, field))
            if given != decoder.depth * needed:
                self.reasons.append(f"{self._file}: {field} names {given} layers; {decoder.depth * needed} are needed")
        additive, general = self.parts.attention == "additive", self.parts.attention == "general"
        asks = general and self.parts.attention_query is not None  # its matrix turns the state, not the memory
        needed_names = {
            "attention_query": additive or asks,
            "attention_key": additive or (general and not asks),
            "attention_energy": additive,
            "attention_place": self.parts.window == "predictive",
            "attention_place_energy": self.parts.window == "predictive",
        }
        for field, needed in needed_names.items():
            if needed != (getattr(self.parts, field) is not None):
                self.reasons.append(f"{self._file}: {field} is {'missing' if needed else 'not used by this attention'}")
        without_bias = ["attention_place", "attention_place_energy", *(["attention_query"] if asks else [])]
        self.reasons += [
            f"{self._file}: {field} has a bias, which is not supported"
            for field in without_bias
            if field in self.linears and self.linears[field].bias is not None
        ]

    def _named_linears(self) -> Iterator[tuple[str, str]]:
        fields = ("attention_query", "attention_key", "attention_energy", "attention_place", "attention_place_energy")
        for field in (*fields, "readout", "context_gate", "feature_projection"):
            if (name := getattr(self.parts, field)) is not None:
                yield field, name
        for field in ("bridge_hidden", "bridge_cell"):
            for number, name in enumerate(getattr(self.parts, field)):
                yield f"{field}.{number}", name

    # -- mapping -----------------------------------------------------------------------------------------------------

    def config(self) -> RecurrentConfig:
        parts, encoder, decoder = self.parts, self.encoder, self.decoder
        target = self.tensors[parts.target_embedding]
        source = target if parts.source_embedding is None else self.tensors[parts.source_embedding]
        attends = parts.attention != "none"
        gate = self.linears.get("context_gate")
        measure = self.linears.get("attention_energy") or self.linears.get("attention_place_energy")
        return RecurrentConfig(
            source_vocab_size=source.shape[0],
            target_vocab_size=target.shape[0],
            embedding_width=target.shape[1],
            encoder_width=encoder.width if encoder else decoder.width,
            decoder_width=decoder.width,
            encoder_layers=encoder.depth if encoder else 0,
            decoder_layers=decoder.depth,
            pad_id=parts.pad_id,
            eos_id=parts.eos_id,
            decoder_start_id=parts.decoder_start_id,
            cell=decoder.cell,
            bidirectional="all" if encoder and encoder.directions == 2 else "none",
            merge=parts.merge,
            reverse_source=parts.reverse_source,
            bridge=parts.bridge,
            bridge_from=parts.bridge_from,
            attention=parts.attention,
            attention_width=measure.weight.shape[1] if measure else 0,
            attention_activation=parts.attention_activation,
            attention_order=parts.attention_order,
            context_gate="none" if gate is None else "scalar" if len(gate.weight) == 1 else "vector",
            fixed_context=not attends and "context" in (*parts.decoder_input, *parts.readout_input),
            window=parts.window,
            window_radius=parts.window_radius,
            input_feeding="fed" in parts.decoder_input,
            readout="none" if parts.readout is None else {"none": "linear"}.get(parts.readout_activation, "tanh"),
            readout_width=self.linears["readout"].weight.shape[0] if parts.readout else 0,
            readout_context="context" in parts.readout_input,
            readout_embedding="embedding" in parts.readout_input,
            share_embeddings=parts.source_embedding == parts.target_embedding,
            tie_output=parts.output == parts.target_embedding,
            output_bias=parts.output_bias is not None,
            source_features=parts.source_features,
            feature_projection=parts.feature_projection is not None,
            max_positions=parts.max_positions,
            dropout=0.0,
        )

    def mapped(self, config: RecurrentConfig) -> dict[str, Tensor]:
        """Their names -> ours. What has no place of ours keeps its name, so that `fill` reports it."""
        parts = self.parts
        mapped = self.unused()
        mapped["target_embedding.weight"] = self.tensors[parts.target_embedding]
        if parts.source_embedding is not None:
            mapped["source_embedding.weight"] = self.tensors[parts.source_embedding]
        for field, ours in (("feature_projection", "source_embedding"), ("context_gate", "decoder.gate")):
            if field in self.linears:
                _put(mapped, ours, self.linears[field].weight, self.linears[field].bias_or_zero)
        for (layer, way), weights in (self.encoder.layers if self.encoder else {}).items():
            mapped |= {f"encoder.{layer}.cells.{way}.{part}": weights[part] for part in _PARTS}
        for (layer, _), weights in self.decoder.layers.items():
            mapped |= {f"decoder.cells.{layer}.{part}": weights[part] for part in _PARTS}
        widths = {
            "embedding": config.embedding_width,
            "hidden": config.decoder_width,
            "context": config.memory_width,
            "fed": config.fed_width,
        }
        first = "decoder.cells.0.weight_ih"
        mapped[first] = _reordered(mapped[first], parts.decoder_input, ("embedding", "fed", "context"), widths)
        head = Linear(self.tensors[parts.output], self.optional(parts.output_bias))
        found = ("hidden", "context", "embedding")
        if parts.readout:
            readout = self.linears["readout"]
            _put(mapped, "decoder.readout", readout.weight, readout.bias_or_zero)
            name = "decoder.readout.weight"
            mapped[name] = _reordered(mapped[name], parts.readout_input, found, widths)
            _put(mapped, "output", head.weight, head.bias)
        else:
            _put(mapped, "output", _reordered(head.weight, parts.readout_input, found, widths), head.bias)
        per_layer = [field for field in ("bridge_hidden", "bridge_cell") if getattr(parts, field)]
        for layer in range(config.decoder_layers if per_layer else 0):
            for part, field in enumerate(per_layer):
                linear = self.linears[f"{field}.{layer}"]
                number = layer * len(per_layer) + part
                _put(mapped, f"bridge.projections.{number}", linear.weight, linear.bias_or_zero)
        self._map_attention(mapped, config)
        return mapped

    def _map_attention(self, mapped: dict[str, Tensor], config: RecurrentConfig) -> None:
        # A bias of the energy, or of general attention's keys, moves all scores alike: the softmax does not see it.
        parts, linears = self.parts, self.linears
        if parts.attention == "general" and parts.attention_query:
            _put(mapped, "decoder.attention.key", linears["attention_query"].weight.T, None)
        elif parts.attention_key:
            key = linears["attention_key"]
            weight = key.weight
            if parts.attention_query:
                query = linears["attention_query"]
                asking, bias = query.weight, query.bias_or_zero
                if parts.attention_query == parts.attention_key:
                    asking, weight = weight[:, : config.decoder_width], weight[:, config.decoder_width :]
                elif key.bias is not None:
                    bias = bias + key.bias
                _put(mapped, "decoder.attention.query", asking, bias)
                _put(mapped, "decoder.attention.energy", linears["attention_energy"].weight, None)
            _put(mapped, "decoder.attention.key", weight, None)
        if parts.attention_place:
            _put(mapped, "decoder.attention.place", linears["attention_place"].weight, None)
            _put(mapped, "decoder.attention.place_energy", linears["attention_place_energy"].weight, None)


def _put(mapped: dict[str, Tensor], name: str, weight: Tensor, bias: Tensor | None) -> None:
    mapped[f"{name}.weight"] = weight
    if bias is not None:
        mapped[f"{name}.bias"] = bias


def _reordered(weight: Tensor, theirs: Sequence[str], ours: Sequence[str], widths: dict[str, int]) -> Tensor:
    """Columns for their parts in their order -> in ours. A weight of another width stays as it is, to be reported."""
    if sum(widths[part] for part in theirs) != weight.shape[1]:
        return weight
    columns = dict(zip(theirs, torch.split(weight, [widths[part] for part in theirs], dim=1), strict=True))
    return torch.cat([columns[part] for part in ours if part in columns], dim=1)
