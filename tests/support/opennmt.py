"""Checkpoints as OpenNMT-py 3 writes them, which can't be installed here: its modules written anew by their own names,
and a model of Hugging Face's that computes the same, whose channels only stand in another order."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PegasusConfig, PegasusForConditionalGeneration

from tests.support.seq2seq import POSITIONS, Seq2SeqShape, enlivened, pieces, sentencepiece_model

SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
_WIDTH, _HEADS, _FEED_FORWARD, _LAYERS = 32, 4, 48, 2


def words() -> list[str]:
    return [*SPECIAL, *(word for word, _ in pieces()), "averyunlikelytoken0"]


def options(**changed: Any) -> Namespace:
    usual = {
        "model_task": "seq2seq",
        "model_type": "text",
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_hid_size": _WIDTH,
        "dec_hid_size": _WIDTH,
        "src_word_vec_size": _WIDTH,
        "tgt_word_vec_size": _WIDTH,
        "enc_layers": _LAYERS,
        "dec_layers": _LAYERS,
        "heads": _HEADS,
        "transformer_ff": _FEED_FORWARD,
        "position_encoding": True,
        "position_encoding_type": "SinusoidalInterleaved",
        "max_relative_positions": 0,
        "self_attn_type": "scaled-dot",
        "layer_norm": "standard",
        "norm_eps": 1e-5,
        "pos_ffn_activation_fn": "relu",
        "lora_layers": [],
        "quant_layers": [],
        "dropout": [0.1],
    }
    return Namespace(**{**usual, **changed})


def write(folder: Path, model: dict[str, Tensor], generator: dict[str, Tensor], opt: Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spm.model").write_bytes(sentencepiece_model())
    (folder / "config.json").write_text(json.dumps({"family": "opennmt_py", "max_positions": POSITIONS}))
    vocabulary = {"src": words(), "tgt": words(), "data_task": "seq2seq", "decoder_start_token": "<s>"}
    content = {"model": model, "generator": generator, "vocab": vocabulary, "opt": opt, "optim": {"steps": 7}}
    torch.save(content, folder / "model_step_7.pt")


@dataclass(frozen=True)
class OpenNmtShape(Seq2SeqShape):
    """Pegasus is OpenNMT-py's Transformer, but for sines and cosines, which stand in two halves there."""

    def original(self) -> Any:
        torch.manual_seed(self.seed)
        config = PegasusConfig(
            vocab_size=len(words()),
            d_model=_WIDTH,
            encoder_layers=_LAYERS,
            decoder_layers=_LAYERS,
            encoder_attention_heads=_HEADS,
            decoder_attention_heads=_HEADS,
            encoder_ffn_dim=_FEED_FORWARD,
            decoder_ffn_dim=_FEED_FORWARD,
            max_position_embeddings=POSITIONS,
            scale_embedding=True,
            activation_function="relu",
            pad_token_id=1,
            decoder_start_token_id=2,
            eos_token_id=3,
            forced_eos_token_id=None,
        )
        return enlivened(PegasusForConditionalGeneration(config).eval(), self.generation, self.across)

    def write(self, folder: Path, **saving: Any) -> None:
        weights = self.original().state_dict()
        model: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if name.startswith(("model.encoder", "model.decoder")) and "embed_positions" not in name:
                model[_their_name(name)] = _reordered(name, tensor)
        generator = {
            "weight": model["decoder.embeddings.make_embedding.emb_luts.0.weight"],
            "bias": weights["final_logits_bias"][0],
        }
        for side in ("encoder", "decoder"):
            model[f"{side}.embeddings.make_embedding.pe.pe"] = torch.zeros(5000, 1, _WIDTH)
        write(folder, model, generator, options())


def _their_name(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens", "embeddings.make_embedding.emb_luts.0")
    side = name.partition(".")[0]
    name = name.replace(".layers.", ".transformer." if side == "encoder" else ".transformer_layers.")
    first = "layer_norm" if side == "encoder" else "layer_norm_1"
    for theirs, ours in (
        ("self_attn_layer_norm", first),
        ("encoder_attn_layer_norm", "layer_norm_2"),
        ("final_layer_norm", "feed_forward.layer_norm"),
        ("encoder_attn.", "context_attn."),
        ("q_proj", "linear_query"),
        ("k_proj", "linear_keys"),
        ("v_proj", "linear_values"),
        ("out_proj", "final_linear"),
        ("fc1", "feed_forward.w_1"),
        ("fc2", "feed_forward.w_2"),
    ):
        name = name.replace(theirs, ours)
    return name


def _reordered(name: str, tensor: Tensor) -> Tensor:
    """sin, sin, cos, cos -> sin, cos, sin, cos: in all that the residual stream passes."""
    order = torch.arange(_WIDTH).reshape(2, -1).T.reshape(-1)
    if "norm" in name or ("out_proj" in name or "fc2" in name):
        return tensor[order]
    if name.endswith("bias"):
        return tensor
    return tensor[:, order]


OPENNMT = OpenNmtShape("opennmt", "pegasus", "", seed=1)


# -- its modules, for what no model of Hugging Face's has ------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class MultiHeadedAttention(nn.Module):
    def __init__(self, opt: Namespace) -> None:
        super().__init__()
        self.kv = getattr(opt, "num_kv", 0) or _HEADS
        wide, bias = _WIDTH // _HEADS * self.kv, getattr(opt, "add_qkvbias", False)
        self.linear_keys, self.linear_values = (nn.Linear(_WIDTH, wide, bias) for _ in range(2))
        self.linear_query, self.final_linear = (nn.Linear(_WIDTH, _WIDTH, bias) for _ in range(2))

    def forward(self, key: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(*x.shape[:2], count, -1).transpose(1, 2).repeat_interleave(_HEADS // count, 1)

        q = heads(self.linear_query(query), _HEADS) / math.sqrt(_WIDTH // _HEADS)
        k, v = heads(self.linear_keys(key), self.kv), heads(self.linear_values(key), self.kv)
        paid = (q @ k.transpose(2, 3)).masked_fill(~mask, -1e18).softmax(-1)
        return self.final_linear((paid @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, opt: Namespace, norm: type[nn.Module] | Any) -> None:
        super().__init__()
        bias, name = getattr(opt, "add_ffnbias", True), opt.pos_ffn_activation_fn
        self.w_1, self.w_2 = nn.Linear(_WIDTH, _FEED_FORWARD, bias), nn.Linear(_FEED_FORWARD, _WIDTH, bias)
        self.w_3 = nn.Linear(_WIDTH, _FEED_FORWARD, bias) if name in ("silu", "gated-gelu") else None
        self.layer_norm = norm(_WIDTH)
        self.activation = {"relu": functional.relu, "silu": functional.silu}.get(name, functional.gelu)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        inner = self.activation(self.w_1(normed))
        return self.w_2(inner if self.w_3 is None else inner * self.w_3(normed)) + x  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, opt: Namespace, norm: Any, decoder: bool) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = MultiHeadedAttention(opt), FeedForward(opt, norm)
        if decoder:
            self.layer_norm_1, self.layer_norm_2 = norm(_WIDTH), norm(_WIDTH)
            self.context_attn = MultiHeadedAttention(opt)
        else:
            self.layer_norm = norm(_WIDTH)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        normed = (self.layer_norm if memory is None else self.layer_norm_1)(x)
        x = x + self.self_attn(normed, normed, mask)
        if memory is not None:
            x = x + self.context_attn(memory, self.layer_norm_2(x), seen)
        return self.feed_forward(x)  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.make_embedding = nn.ModuleDict({"emb_luts": nn.ModuleList([nn.Embedding(len(words()), _WIDTH)])})

    def forward(self, tokens: Tensor) -> Tensor:
        places, half = torch.arange(tokens.shape[1])[:, None].float(), _WIDTH // 2
        if self.kind == "SinusoidalInterleaved":
            angles = places * torch.exp(torch.arange(0, _WIDTH, 2).float() * -(math.log(10000.0) / _WIDTH))
            table = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
        else:
            angles = places * torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
            table = torch.cat([angles.sin(), angles.cos()], 1)
        vectors: Tensor = self.make_embedding["emb_luts"][0](tokens)  # type: ignore[index]
        return vectors * math.sqrt(_WIDTH) + table


class Side(nn.Module):
    def __init__(self, opt: Namespace, decoder: bool) -> None:
        super().__init__()
        norm = RMSNorm if opt.layer_norm == "rms" else lambda width: nn.LayerNorm(width, 1e-5)
        self.embeddings = Embeddings(opt.position_encoding_type)
        layers = nn.ModuleList(Layer(opt, norm, decoder) for _ in range(_LAYERS))
        if decoder:
            self.transformer_layers = layers
        else:
            self.transformer = layers
        self.layer_norm = norm(_WIDTH)


class NMTModel(nn.Module):
    def __init__(self, opt: Namespace, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.decoder = Side(opt, decoder=False), Side(opt, decoder=True)
        self.generator = nn.Linear(_WIDTH, len(words()))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        seen = mask[:, None, None, :]
        memory = self.encoder.embeddings(source)
        for layer in self.encoder.transformer:
            memory = layer(memory, seen)
        memory = self.encoder.layer_norm(memory)
        x, causal = self.decoder.embeddings(target), torch.ones(target.shape[1], target.shape[1]).tril().bool()
        for layer in self.decoder.transformer_layers:
            x = layer(x, causal, memory, seen)
        return self.generator(self.decoder.layer_norm(x))  # type: ignore[no-any-return]

    def save(self, folder: Path, opt: Namespace) -> None:
        state = {name: each for name, each in self.state_dict().items() if "generator" not in name}
        write(folder, state, dict(self.generator.state_dict()), opt)


@dataclass(frozen=True)
class Variant:
    name: str
    changed: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("usual", {"add_qkvbias": False}),
    Variant("biased-concat", {"add_qkvbias": True, "position_encoding_type": "SinusoidalConcat"}),
    Variant("modern", {"layer_norm": "rms", "pos_ffn_activation_fn": "silu", "add_ffnbias": False, "num_kv": 2}),
    Variant("gated", {"pos_ffn_activation_fn": "gated-gelu"}),
)
