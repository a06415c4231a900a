"""A checkpoint of our reference Transformer, as the recipe keeps it -> CTranslate2's format: SOURCE TARGET.

Runs in CTranslate2's own environment.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from ctranslate2.specs import common_spec, transformer_spec
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.benchmarks.peers.ctranslate2_convert import Tensors, set_linear, set_norm


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((source / "config.json").read_text())
    expected = {"norm": "pre", "activation": "relu", "positions": "sinusoidal", "share_embeddings": True}
    for key, value in {**expected, "tie_output": True, "final_norm": True, "scale_embedding": True}.items():
        if config[key] != value:
            raise SystemExit(f"{key} is {config[key]!r}; only {value!r} is mapped here")
    tensors: Tensors = {
        name: tensor.astype(np.float32) for name, tensor in load_file(source / "model.safetensors").items()
    }
    spec = transformer_spec.TransformerSpec.from_config(
        (config["encoder_layers"], config["decoder_layers"]),
        config["heads"],
        pre_norm=True,
        activation=common_spec.Activation.RELU,
    )
    embedding = tensors["source_embedding.tokens.weight"]
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.scale_embeddings = math.sqrt(config["d_model"])
        stack.position_encodings.encodings = interleaved(config["max_positions"], config["d_model"])
        set_norm(stack.layer_norm, tensors, f"{name}_norm")
        for number, layer in enumerate(stack.layer):
            set_layer(layer, tensors, f"{name}.{number}")
    spec.encoder.embeddings[0].weight = embedding
    spec.decoder.embeddings.weight = embedding
    spec.decoder.projection.weight = embedding
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(source / "spm.model"))
    vocabulary = [pieces.id_to_piece(word) for word in range(config["target_vocab_size"])]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.eos_token = vocabulary[config["eos_id"]]
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[config["decoder_start_id"]]
    spec.config.unk_token = vocabulary[pieces.unk_id()]
    spec.config.layer_norm_epsilon = config["norm_eps"]
    spec.validate()
    spec.optimize(quantization="float32")
    target.mkdir(parents=True)
    spec.save(str(target))


def interleaved(length: int, width: int) -> NDArray[np.float32]:
    angles = np.arange(length)[:, None] / np.power(10000, np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(length, width).astype(np.float32)


def set_layer(layer: Any, tensors: Tensors, name: str) -> None:
    attention = layer.self_attention
    set_linear(attention.linear[0], tensors, f"{name}.attention.qkv")
    set_linear(attention.linear[1], tensors, f"{name}.attention.output")
    set_norm(attention.layer_norm, tensors, f"{name}.attention_norm")
    if hasattr(layer, "attention"):
        for target, part in zip(layer.attention.linear, ("query", "key_value", "output"), strict=True):
            set_linear(target, tensors, f"{name}.cross_attention.{part}")
        set_norm(layer.attention.layer_norm, tensors, f"{name}.cross_attention_norm")
    set_linear(layer.ffn.linear_0, tensors, f"{name}.feed_forward.inner")
    set_linear(layer.ffn.linear_1, tensors, f"{name}.feed_forward.outer")
    set_norm(layer.ffn.layer_norm, tensors, f"{name}.feed_forward_norm")


if __name__ == "__main__":
    main()
