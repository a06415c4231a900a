"""What shapes a Transformer. A stack of layers has one configuration, so an encoder and a decoder may differ in all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
POSITIONS = ("sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "learned", "learned_fairseq", "rotary", "none")
NORMS = ("layer", "rms")
PLACEMENTS = ("pre", "post", "output", "both")
QUERY_KEY_NORMS = ("none", "head", "width")


@dataclass(frozen=True)
class AttentionConfig:
    heads: int
    head_width: int
    kv_heads: int  # fewer than heads: each key head answers several query heads
    qkv_bias: bool = True
    output_bias: bool = True
    query_key_norm: str = "none"  # RMSNorm of queries and keys, each head alone or over the whole width
    norm_eps: float = 1e-6
    softcap: float | None = None  # scores are bent so that they stay below it: cap * tanh(score / cap)

    @classmethod
    def even(cls, d_model: int, heads: int) -> AttentionConfig:
        """Heads that share the model's width, with biases everywhere: as in the paper, and in torch.nn."""
        return cls(heads, d_model // max(1, heads), heads)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    def problems(self) -> Iterator[str]:
        yield from at_least_one(self, "heads", "kv_heads", "head_width")
        yield from one_of("query_key_norm", self.query_key_norm, QUERY_KEY_NORMS)
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            yield f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}"


@dataclass(frozen=True)
class FeedForwardConfig:
    width: int
    activation: str = "relu"
    gated: bool = False  # activation(gate) * up, otherwise activation alone
    bias: bool = True

    def problems(self) -> Iterator[str]:
        if self.width < 1:
            yield f"ffn is {self.width}; it must be at least 1"
        yield from one_of("activation", self.activation, ACTIVATIONS)


@dataclass(frozen=True)
class NormConfig:
    kind: str = "layer"  # LayerNorm, or RMSNorm
    eps: float = 1e-5
    # pre: normalise what enters a sublayer; post: the sum that leaves it; output: what a sublayer adds to that sum;
    # both: what enters it, and what it adds
    placement: str = "pre"
    final: bool = True  # one more norm after the last layer

    def problems(self) -> Iterator[str]:
        yield from one_of("kind of norm", self.kind, NORMS)
        yield from one_of("norm", self.placement, PLACEMENTS)


@dataclass(frozen=True)
class RelativeConfig:
    """What attention adds for how far apart two tokens stand: a number per head and distance, as in T5."""

    max_distance: int  # from here on, all distances are alike
    per_layer: bool = False  # every layer has numbers of its own; else all share one table

    def problems(self) -> Iterator[str]:
        yield from at_least_one(self, "max_distance")


@dataclass(frozen=True)
class StackConfig:
    """An encoder, or a decoder with or without cross-attention, and the embedding below it."""

    vocab_size: int
    d_model: int
    layers: int
    attention: AttentionConfig
    feed_forward: FeedForwardConfig
    cross_attention: AttentionConfig | None = None
    norm: NormConfig = field(default_factory=NormConfig)
    positions: str = "sinusoidal"  # sin/cos interleaved, in two halves, as in fairseq, learned, rotary, or none
    max_positions: int = 256
    padding_id: int = 0  # of fairseq's positions: they are counted from behind this id, and it has none
    relative: RelativeConfig | None = None
    # By layer, where they differ: how many tokens one sees, itself included (None: all), and which table of angles
    # its rotary embedding has (None: it has none). Empty: all see everything, and rotary positions have one table.
    windows: tuple[int | None, ...] = ()
    rotary_tables: tuple[int | None, ...] = ()
    parallel: bool = False  # attention and feed-forward read the same input, and both are added to it
    embedding_scale: float = 1.0
    embedding_width: int | None = None  # of the tokens' vectors, where they are projected to d_model
    embedding_norm: bool = False  # what enters the first layer is normalised
    output_transform: str | None = None  # BERT's: the activation of a dense layer before the last norm
    dropout: float = 0.0

    def problems(self) -> list[str]:
        """Every reason why this stack can't be built, in sentences."""
        found = [*at_least_one(self, "vocab_size", "d_model", "layers"), *self.attention.problems()]
        found += [*self.feed_forward.problems(), *self.norm.problems()]
        found += [*(self.cross_attention.problems() if self.cross_attention else ())]
        found += [*(self.relative.problems() if self.relative else ())]
        found += one_of("positions", self.positions, POSITIONS)
        if self.output_transform is not None:
            found += one_of("output_transform", self.output_transform, ACTIVATIONS)
        if self.positions.startswith("sinusoidal") and self.d_model % 2:
            found.append(f"sinusoidal positions need an even d_model, not {self.d_model}")
        if self.positions == "rotary" and self.attention.head_width % 2:
            found.append(f"rotary positions need an even head_width, not {self.attention.head_width}")
        if self.max_positions < 2:
            found.append(f"max_positions is {self.max_positions}; a beginning and an end need 2")
        for name, by_layer in (("windows", self.windows), ("rotary_tables", self.rotary_tables)):
            if by_layer and len(by_layer) != self.layers:
                found.append(f"{name} has {len(by_layer)} entries, but there are {self.layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            found.append("a window must be at least 1")
        if self.parallel and (self.norm.placement != "pre" or self.cross_attention is not None):
            found.append("a parallel layer has its norms in front and no cross-attention")
        return found

    @property
    def angle_tables(self) -> int:
        if self.positions != "rotary":
            return 0
        return 1 + max((table for table in self.rotary_tables if table is not None), default=0)


@dataclass(frozen=True)
class EncoderDecoderConfig:
    encoder: StackConfig
    decoder: StackConfig
    share_embeddings: bool = True  # of source and target
    tie_output: bool = True  # the target embedding is the output projection
    output_bias: bool = False

    def problems(self) -> list[str]:
        """Each reason once, where it is one against both."""
        found = list(dict.fromkeys((*self.encoder.problems(), *self.decoder.problems())))
        if self.share_embeddings and self.encoder.vocab_size != self.decoder.vocab_size:
            found.append(
                "share_embeddings needs one vocabulary, but source_vocab_size is "
                f"{self.encoder.vocab_size} and target_vocab_size is {self.decoder.vocab_size}"
            )
        if self.share_embeddings and self.encoder.d_model != self.decoder.d_model:
            widths = f"{self.encoder.d_model} and {self.decoder.d_model}"
            found.append(f"share_embeddings needs one d_model, but encoder and decoder have {widths}")
        return found


@dataclass(frozen=True)
class DecoderOnlyConfig:
    decoder: StackConfig
    tie_output: bool = True
    output_bias: bool = False
    logit_softcap: float | None = None  # cap * tanh(logit / cap)

    def problems(self) -> list[str]:
        return self.decoder.problems()


def uneven_heads(d_model: int, heads: int) -> Iterator[str]:
    """For configurations in which the heads share the model's width."""
    if heads >= 1 and d_model % heads:
        yield f"d_model {d_model} is not a multiple of heads {heads}"


def at_least_one(config: object, *names: str) -> Iterator[str]:
    for name in names:
        if getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must be at least 1"


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> Iterator[str]:
    if value not in allowed:
        yield f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}"
