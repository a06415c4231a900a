"""A Hugging Face Marian directory -> CTranslate2's format: SOURCE TARGET.

Runs in CTranslate2's own environment. Its ready-made converter wants torch and a tokenizer; here neither is needed:
words are called t0, t1, ... The layout is that of its MarianMTLoader.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.converters import utils
from ctranslate2.specs import common_spec, transformer_spec
from numpy.typing import NDArray
from safetensors.numpy import load_file

Tensors = dict[str, NDArray[np.float32]]


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((source / "config.json").read_text())
    tensors: Tensors = load_file(source / "model.safetensors")
    spec = transformer_spec.TransformerSpec.from_config(
        (config["encoder_layers"], config["decoder_layers"]),
        config["encoder_attention_heads"],
        pre_norm=False,
        activation=common_spec.Activation.SWISH,
    )
    # It starts from a zero embedding instead of the padding word, which is the last one and is left out.
    words = config["vocab_size"] - 1
    embedding = tensors["model.shared.weight"][:words]
    positions = sinusoids(config["max_position_embeddings"], config["d_model"])
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.scale_embeddings = math.sqrt(config["d_model"])
        stack.position_encodings.encodings = positions
        for number, layer in enumerate(stack.layer):
            set_layer(layer, tensors, f"model.{name}.layers.{number}")
    spec.encoder.embeddings[0].weight = embedding
    spec.decoder.embeddings.weight = embedding
    spec.decoder.projection.weight = embedding
    spec.decoder.start_from_zero_embedding = True
    vocabulary = [f"t{word}" for word in range(words)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    end = f"t{config['eos_token_id']}"
    spec.config.eos_token = spec.config.decoder_start_token = end
    spec.config.bos_token, spec.config.unk_token = end, "t1"
    spec.validate()
    spec.optimize(quantization="float32")
    target.mkdir(parents=True)
    spec.save(str(target))


def sinusoids(length: int, width: int) -> NDArray[np.float32]:
    """Sines, then cosines, as Marian has them."""
    angles = np.arange(length)[:, None] / np.power(10000, np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def set_layer(layer: Any, tensors: Tensors, name: str) -> None:
    parts: list[tuple[str, str, tuple[slice, ...]]] = [("self_attention", "self_attn", (slice(0, 3),))]
    if hasattr(layer, "attention"):
        parts.append(("attention", "encoder_attn", (slice(0, 1), slice(1, 3))))
    for ours, theirs, groups in parts:
        attention = getattr(layer, ours)
        projections = [linear(tensors, f"{name}.{theirs}.{part}_proj") for part in "qkv"]
        for target, group in zip(attention.linear, groups, strict=False):
            utils.fuse_linear(target, projections[group])
        set_linear(attention.linear[-1], tensors, f"{name}.{theirs}.out_proj")
        set_norm(attention.layer_norm, tensors, f"{name}.{theirs}_layer_norm")
    set_linear(layer.ffn.linear_0, tensors, f"{name}.fc1")
    set_linear(layer.ffn.linear_1, tensors, f"{name}.fc2")
    set_norm(layer.ffn.layer_norm, tensors, f"{name}.final_layer_norm")


def linear(tensors: Tensors, name: str) -> Any:
    spec = common_spec.LinearSpec()
    set_linear(spec, tensors, name)
    return spec


def set_linear(spec: Any, tensors: Tensors, name: str) -> None:
    spec.weight, spec.bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def set_norm(spec: Any, tensors: Tensors, name: str) -> None:
    spec.gamma, spec.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]


if __name__ == "__main__":
    main()
