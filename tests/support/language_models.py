"""Small language models with random weights whose texts vary and end by themselves, as Hugging Face saves them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from beamline.converters.families import converter_for
from beamline.serving.contract.manifest import Manifest, read_manifest
from tests.support.fixture_cache import fixture_cache
from tests.support.text import english_lines

VOCABULARY = 320
BOS, EOS, SECOND_EOS = 0, 1, 2
SPECIAL = ("<|begin|>", "<|end|>", "<|stop|>")
POSITIONS = 128
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class LanguageShape:
    """One kind of model: how its configuration differs from the smallest of its family."""

    family: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # one by which texts vary and end

    def original(self) -> Any:
        torch.manual_seed(self.seed)
        sizes = _SIZES.get(self.family, _LLAMA_SIZES)
        config = AutoConfig.for_model(self.family, **{**_COMMON, **sizes, **self.options})
        model = AutoModelForCausalLM.from_config(config).eval()
        _enliven(model)
        return model


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


GPT2 = LanguageShape("gpt2", "gpt2")
LLAMA = LanguageShape(
    "llama",
    "llama3-grouped",
    rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
)
SHAPES = (
    GPT2,
    LanguageShape("gpt2", "gpt2-untied-relu", {"tie_word_embeddings": False, "activation_function": "relu"}),
    LLAMA,
    LanguageShape("llama", "default-tied", {"tie_word_embeddings": True}),
    LanguageShape("llama", "all-heads-biases", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    LanguageShape("llama", "one-key-head", {"num_key_value_heads": 1, "head_dim": 12}),
    LanguageShape("llama", "linear", rope("linear", factor=4.0)),
    LanguageShape("llama", "dynamic", rope("dynamic", factor=4.0)),
    LanguageShape("llama", "yarn", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    LanguageShape("mistral", "mistral", {"sliding_window": None}),
    LanguageShape("qwen2", "qwen2"),
)

_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, SECOND_EOS],
    "pad_token_id": None,
}
_LLAMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": POSITIONS},
}


@torch.no_grad()
def _enliven(model: Any) -> None:
    """Random weights of the usual size repeat one word for ever; these were found by trying. Long vectors for the end
    tokens make texts end."""
    usual = 0.0 if model.config.model_type.startswith("gemma") else 1.0  # its norms add one to their weights
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            wide = "lm_head" in name or "wte" in name or "embed_tokens" in name
            parameter.normal_(std=0.35 if wide else 0.25)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        else:
            parameter.normal_(mean=usual, std=0.1)
    model.get_output_embeddings().weight[[EOS, SECOND_EOS]] *= 1.5
    model.generation_config.max_length = longest_text(model.config)


def longest_text(config: Any) -> int:
    """In tokens; each family says it in its own words."""
    names = ("max_position_embeddings", "n_positions", "seq_length")
    return next(int(value) for name in names if (value := getattr(config, name, None)))


@cache
def tokenizer_json() -> str:
    """Byte-level, trained on Python's documentation, with three special tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(english_lines()[:2000], trainer)
    return str(tokenizer.to_str())


def write_language_model(
    folder: Path, shape: LanguageShape, *, generation: dict[str, Any] | None = None, **saving: Any
) -> Path:
    """A directory as it is published. `saving` goes to `save_pretrained` (shards, and other formats)."""
    original = shape.original()
    original.save_pretrained(folder, **saving)
    special = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS]}
    if shape.family == "qwen2":  # its tokenizer adds words for these unless they are named
        special |= {"pad_token": SPECIAL[SECOND_EOS], "unk_token": SPECIAL[SECOND_EOS]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json()), **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = {"bos_token_id": BOS, "eos_token_id": [EOS, SECOND_EOS], **(generation or {})}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@dataclass(frozen=True)
class ConvertedLanguageModel:
    # The cache of fixtures asks for its `repr`: neither where it lies, nor what torch prints of it.
    original: Any = field(repr=False)
    source: Path = field(repr=False)
    folder: Path = field(repr=False)
    manifest: Manifest


def convert_language_model(shape: LanguageShape, folder: Path, grid: str = "whole") -> ConvertedLanguageModel:
    """As version 1 of a model with the shape's name, in `folder / "repository"`. `grid`: how much its certificate
    compares."""
    fixture_cache().fill(folder, write_converted, shape=shape, grid=grid)
    version = folder / "repository" / shape.name / "1"
    return ConvertedLanguageModel(shape.original(), folder / "source", version, read_manifest(version))


def write_converted(folder: Path, shape: LanguageShape, grid: str = "whole") -> None:
    source = write_language_model(folder / "source", shape)
    converter_for(source).convert(shape.name, folder / "repository", grid=grid)
