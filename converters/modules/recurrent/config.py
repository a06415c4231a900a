"""What shapes a recurrent encoder-decoder: one configuration for the whole family, from Sutskever's to GNMT."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}  # in torch.nn's order: lstm i f g o, gru r z n
CHOICES = {
    "cell": tuple(GATES),
    "bidirectional": ("none", "all", "bottom"),
    "merge": ("concat", "sum", "mean"),
    "bridge": ("zero", "copy", "linear", "tanh"),
    "bridge_from": ("each", "top", "mean"),
    "attention": ("none", "additive", "dot", "scaled_dot", "general"),
    "attention_activation": ("tanh", "relu"),
    "attention_order": ("previous", "new"),
    "attention_layer": ("bottom", "top"),
    "context_to": ("bottom", "all"),
    "window": ("all", "monotonic", "predictive"),
    "context_gate": ("none", "scalar", "vector"),
    "readout": ("none", "linear", "tanh"),
}
_SIZES = (
    "source_vocab_size",
    "target_vocab_size",
    "embedding_width",
    "encoder_width",
    "decoder_width",
    "decoder_layers",
)


class EncoderStack:
    """What follows from a configuration that has a stack of recurrent layers which read."""

    embedding_width: int
    encoder_width: int  # of one direction
    encoder_layers: int
    cell: str
    peepholes: bool
    coupled_gates: bool
    bidirectional: str
    merge: str
    residual_from: int | None

    @property
    def states_per_layer(self) -> int:
        return 2 if self.cell == "lstm" else 1

    def directions(self, layer: int) -> int:
        return 2 if self.bidirectional == "all" or (self.bidirectional == "bottom" and layer == 0) else 1

    def encoder_output(self, layer: int) -> int:
        return self.encoder_width * (self.directions(layer) if self.merge == "concat" else 1)

    @property
    def read_width(self) -> int:
        """Of what the bottom layer reads."""
        return self.embedding_width

    def encoder_input(self, layer: int) -> int:
        return self.encoder_output(layer - 1) if layer else self.read_width

    @property
    def memory_width(self) -> int:
        return self.encoder_output(self.encoder_layers - 1) if self.encoder_layers else self.read_width

    def adds_input(self, layer: int) -> bool:
        return self.residual_from is not None and layer >= self.residual_from

    def reading_problems(self) -> list[str]:
        found = []
        if self.cell != "lstm":
            found += [f"{name} needs cell 'lstm'" for name in ("peepholes", "coupled_gates") if getattr(self, name)]
        if self.residual_from is not None:
            if self.residual_from < 1:
                found.append(f"residual_from is {self.residual_from}; the bottom layer 0 can't add its input")
            found += [
                f"residual_from is {self.residual_from}, but encoder layer {layer} turns "
                f"{self.encoder_input(layer)} values into {self.encoder_output(layer)}"
                for layer in range(max(1, self.residual_from), self.encoder_layers)
                if self.encoder_input(layer) != self.encoder_output(layer)
            ]
        return found


@dataclass(frozen=True)
class RecurrentConfig(EncoderStack):
    """Everything that shapes the network, and the ids it was trained with."""

    source_vocab_size: int
    target_vocab_size: int
    embedding_width: int
    encoder_width: int  # of one direction
    decoder_width: int
    encoder_layers: int
    decoder_layers: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    cell: str = "lstm"
    peepholes: bool = False  # an lstm's gates see its cell state
    coupled_gates: bool = False  # an lstm forgets exactly as much as it takes in
    bidirectional: str = "none"  # or all layers, or the bottom one only
    merge: str = "concat"  # how two directions become one
    residual_from: int | None = None  # from this layer on (the bottom is 0), in both stacks, a layer adds its input
    reverse_source: bool = False
    bridge: str = "tanh"  # the decoder's first states: zero, the encoder's last ones, or a projection of them
    bridge_from: str = "each"  # decoder layer i begins with encoder layer i's state, or all with the top one's, or with
    # the mean of what the decoder attends to
    attention: str = "additive"
    attention_width: int = 0  # of additive attention, and of what predicts a window's centre
    attention_activation: str = "tanh"  # of additive attention
    attention_order: str = "new"  # who asks: the state that a step begins with (Bahdanau), or its new one (Luong)
    attention_layer: str = "top"  # the layer whose state asks
    context_to: str = "bottom"  # the decoder layers that the context enters; a new state's enters only those above it
    context_gate: str = "none"  # the state before a step says how much of the context enters: one share, or one each
    fixed_context: bool = False  # without attention: the encoder's last state enters every step, not only the first
    window: str = "all"  # all of the source, or a window around a position that walks along, or is predicted
    window_radius: int = 0
    input_feeding: bool = False  # the attentional vector enters the next step
    readout: str = "tanh"  # a projection of what the decoder found, before the output
    readout_width: int = 0
    readout_context: bool = True  # it sees the context too, where there is one
    readout_embedding: bool = False  # and the word that was read
    share_embeddings: bool = True  # source and target
    tie_output: bool = True  # the target embedding is the output projection
    output_bias: bool = True
    source_features: int = 0  # the source is vectors of so many values instead of words: a grid of an image, frames
    feature_projection: bool = False  # they are projected to embedding_width first
    max_positions: int = 256  # no architecture needs it: the length that it was trained for
    dropout: float = 0.1

    @classmethod
    def gnmt(cls, *, width: int, layers: int = 8, **others: Any) -> RecurrentConfig:
        """Google's: the bottom encoder layer reads both ways, upper layers add their input, and the bottom decoder
        layer's last state asks for the context that enters all layers. `others` are vocabulary, ids, and changes."""
        shape: dict[str, Any] = {
            "embedding_width": width,
            "encoder_width": width,
            "decoder_width": width,
            "encoder_layers": layers,
            "decoder_layers": layers,
            "cell": "lstm",
            "bidirectional": "bottom",
            "merge": "concat",
            "residual_from": 2,
            "bridge": "zero",
            "attention": "additive",
            "attention_width": width,
            "attention_order": "previous",
            "attention_layer": "bottom",
            "context_to": "all",
            "readout": "none",
            "readout_context": False,
        }
        return cls(**{**shape, **others})

    # -- what follows from it ----------------------------------------------------------------------------------------

    def bridge_output(self, layer: int) -> int:
        """Of the state that a decoder layer may begin with."""
        return self.memory_width if self.bridge_from == "mean" else self.encoder_output(layer)

    @property
    def read_width(self) -> int:
        return self.source_features if self.source_features and not self.feature_projection else self.embedding_width

    @property
    def has_context(self) -> bool:
        return self.attention != "none" or self.fixed_context

    def context_enters(self, layer: int) -> bool:
        if not self.has_context:
            return False
        if self.attention != "none" and self.attention_order == "new":
            return self.context_to == "all" and self.attention_layer == "bottom" and layer > 0
        return layer == 0 or self.context_to == "all"

    def decoder_input(self, layer: int) -> int:
        width = self.decoder_width if layer else self.embedding_width + self.fed_width
        return width + self.memory_width * self.context_enters(layer)

    @property
    def feature_width(self) -> int:
        """Of what the decoder found: its top layer's output, the context, the word."""
        width = self.decoder_width + self.memory_width * (self.readout_context and self.has_context)
        return width + self.embedding_width * self.readout_embedding

    @property
    def hidden_width(self) -> int:
        """Of what the output projection gets."""
        return self.feature_width if self.readout == "none" else self.readout_width

    @property
    def fed_width(self) -> int:
        if not self.input_feeding:
            return 0
        return self.memory_width if self.readout == "none" else self.readout_width

    # -- what is wrong with it ---------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Every reason why this configuration can't be built, in sentences."""
        found = [
            f"{name} is {getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}"
            for name, allowed in CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        found += [
            f"{name} is {getattr(self, name)}; it must be at least 1" for name in _SIZES if getattr(self, name) < 1
        ]
        if self.encoder_layers < (0 if self.source_features else 1):
            found.append(f"encoder_layers is {self.encoder_layers}; only a model that reads features can do without")
        if self.max_positions < 2:
            found.append(f"max_positions is {self.max_positions}; a start and an end need 2")
        for name in ("pad_id", "eos_id", "decoder_start_id"):
            if not 0 <= getattr(self, name) < self.target_vocab_size:
                found.append(f"{name} is {getattr(self, name)}, outside the vocabulary")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout is {self.dropout}; it must be at least 0 and less than 1")
        return found or [*self._stack_problems(), *self._attention_problems(), *self._head_problems()]

    def _stack_problems(self) -> list[str]:
        found = [*self._feature_problems(), *self.reading_problems()]
        if self.bridge == "zero":
            return found
        if self.bridge_from == "each" and self.encoder_layers != self.decoder_layers:
            found.append(
                f"bridge_from 'each' needs as many encoder layers ({self.encoder_layers}) "
                f"as decoder layers ({self.decoder_layers}); 'top' begins all of them with the encoder's top layer, "
                "'mean' with the mean of its outputs"
            )
        elif self.bridge == "copy":
            layers = range(self.encoder_layers) if self.bridge_from == "each" else [max(0, self.encoder_layers - 1)]
            found += [
                f"bridge 'copy' needs states of one width, but encoder layer {layer} ends with "
                f"{self.bridge_output(layer)} values and decoder_width is {self.decoder_width}"
                for layer in layers
                if self.bridge_output(layer) != self.decoder_width
            ]
        return found

    def _feature_problems(self) -> list[str]:
        found = []
        if self.source_features < 0:
            found.append(f"source_features is {self.source_features}; it must be at least 0")
        if self.feature_projection and not self.source_features:
            found.append("feature_projection needs a source_features")
        if self.source_features:
            for name in ("share_embeddings", "reverse_source"):
                if getattr(self, name):
                    found.append(f"{name} is for sources of words, not of features")
        if not self.encoder_layers and self.bridge not in ("zero",) and self.bridge_from != "mean":
            found.append("without encoder layers there is no last state: bridge_from must be 'mean', or bridge 'zero'")
        if not self.encoder_layers and self.fixed_context:
            found.append("without encoder layers there is no last state for fixed_context")
        return found

    def _attention_problems(self) -> list[str]:
        found = []
        if self.attention == "none":
            if self.window != "all":
                found.append(f"window {self.window!r} needs attention")
            if self.input_feeding:
                found.append("input_feeding needs attention")
            if self.context_gate != "none":
                found.append("context_gate needs attention")
            if not self.fixed_context and self.bridge == "zero":
                found.append("without attention, fixed_context and bridge, the decoder would see nothing of the source")
            return found
        if self.fixed_context:
            found.append("fixed_context is for models without attention")
        needs_width = self.attention == "additive" or self.window == "predictive"
        if needs_width and self.attention_width < 1:
            found.append("additive attention and predicted windows need an attention_width of at least 1")
        if self.attention in ("dot", "scaled_dot") and self.memory_width != self.decoder_width:
            found.append(
                f"attention {self.attention!r} multiplies decoder states of {self.decoder_width} values "
                f"with encoder outputs of {self.memory_width}"
            )
        if self.window != "all" and self.window_radius < 1:
            found.append(f"window {self.window!r} needs a window_radius of at least 1")
        if self.attention_order == "previous" and self.input_feeding:
            found.append(
                "input_feeding needs attention_order 'new'; with 'previous' the context enters the step anyway"
            )
        if self.context_gate != "none" and self.attention_order == "new":
            found.append("context_gate needs attention_order 'previous'")
        if self.attention_order == "new":
            enters = any(self.context_enters(layer) for layer in range(self.decoder_layers))
            if self.context_to == "all" and not enters:
                found.append("context_to 'all': no layer lies above the one whose new state asks for the context")
            if not (enters or self.input_feeding or self.readout_context):
                found.append("the attention of a new state is not used: no layer, feeding or readout takes it")
        return found

    def _head_problems(self) -> list[str]:
        found = []
        if self.readout != "none" and self.readout_width < 1:
            found.append(f"readout {self.readout!r} needs a readout_width of at least 1")
        if self.tie_output and self.hidden_width != self.embedding_width:
            found.append(
                f"tie_output needs the output's input ({self.hidden_width} values) "
                f"to be as wide as an embedding ({self.embedding_width})"
            )
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            found.append(
                "share_embeddings needs one vocabulary, but source_vocab_size is "
                f"{self.source_vocab_size} and target_vocab_size is {self.target_vocab_size}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def field_names(cls) -> set[str]:
        return {field.name for field in fields(cls)}
