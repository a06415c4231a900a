"""Recurrent language models built on `torch.nn.RNN`, `LSTM` or `GRU`, or on an LSTM that torch.nn does not have.

    {
      "family": "recurrent_language",
      "weights": "model.safetensors",          or .npz, .pt, .pth; may be left out where there is only one
      "tokenizer": "tokenizer.json",    or a sentencepiece model
      "embedding": "encoder",           what the state dict calls its nn.Embedding,
      "rnn": "rnn",                     its nn.LSTM (or RNN, GRU),
      "output": "decoder",              and its nn.Linear
      "eos_id": 0
    }

Optional: "start_id", "max_positions", "residual_from", "peepholes", "coupled_gates", "description", and what is
otherwise read off the weights: "cell" ("rnn_relu" must be said), "vocab_size", "embedding_width", "width", "layers",
"tie_output", "output_bias". `RecurrentLanguageConfig` says what they mean. Layers are named as torch.nn names them:
`rnn.weight_ih_l0`. With coupled gates, the gates are f g o; with peepholes, `rnn.peephole_l0` holds a row for each of
i f o, or f o.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from beamline.converters.checkpoints.files import (
    every_reason,
    fill,
    named_weights,
    read_json,
    read_weights,
    reasons_of,
)
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import read_tokenizer
from beamline.converters.modules.recurrent.language_model import (
    RecurrentLanguageConfig,
    RecurrentLanguageModel,
    RecurrentLanguageSteps,
)
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import DecodingDefaults, Limits, Vocabulary
from beamline.serving.errors import UnsupportedCheckpoint

MAX_BEAM_SIZE = 16
_LAYER = re.compile(r"layers\.(\d+)\.cells\.0\.(\w+)")


@dataclass(frozen=True)
class RecurrentLanguageParts:
    """What a checkpoint calls its parts, and the files beside it."""

    embedding: str = "embedding"
    rnn: str = "rnn"
    output: str = "output"
    weights: str | None = None
    tokenizer: str = "tokenizer.json"  # or a sentencepiece model
    description: str = ""


_PARTS = {field.name for field in fields(RecurrentLanguageParts)}


class RecurrentLanguageConverter(GenerationConverter):
    family = "recurrent_language"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "language models on `torch.nn.RNN`, `LSTM` or `GRU`; a file names their parts"

    def __init__(self, source: Path, config: Path) -> None:
        super().__init__(source)
        self.config = config

    @classmethod
    def from_source(cls, source: Source) -> Self:
        return cls(source.path, source.config_file)

    def load(self) -> LoadedModel:
        content = read_json(self.config)
        parts = self._parts(content)
        tensors = read_weights(self.source, named_weights(self.source, parts.weights))
        needed = {"embedding": f"{parts.embedding}.weight", "rnn": f"{parts.rnn}.weight_hh_l0"}
        missing = [
            f"{self.config.name}: {field} is {getattr(parts, field)!r}, which the weights don't have"
            for field, name in needed.items()
            if name not in tensors
        ]
        if missing:
            raise UnsupportedCheckpoint(str(self.source), missing)
        config = self._shape({**_measured(tensors, parts, bool(content.get("coupled_gates"))), **content})
        model = RecurrentLanguageModel(config)
        theirs = {name: _their_name(name, parts) for name in model.state_dict()}
        fill(model, _ours(tensors, config, theirs), str(self.source), theirs)
        model.eval()
        tokenizer = read_tokenizer(self.source / parts.tokenizer, add_eos=False)  # a prompt goes on
        limits = Limits(
            max_source_length=config.max_positions - 1,
            max_target_length=config.max_positions,
            max_beam_size=min(MAX_BEAM_SIZE, config.vocab_size // 4),
        )
        return LoadedModel(
            model=RecurrentLanguageSteps(model).eval(),
            original=model,
            source_tokenizer=tokenizer,
            target_tokenizer=tokenizer,
            vocabulary=Vocabulary(
                source_size=config.vocab_size,
                target_size=config.vocab_size,
                pad_id=0,  # never seen: any word will do
                eos_ids=(config.eos_id,),
                decoder_start_id=config.start_id,
            ),
            limits=limits,
            defaults=DecodingDefaults(beam_size=1, max_length=limits.max_target_length),
            description=parts.description,
        )

    def _parts(self, content: dict[str, Any]) -> RecurrentLanguageParts:
        with every_reason(self.config):
            return TypeAdapter(RecurrentLanguageParts).validate_json(json.dumps(_chosen(content, _PARTS)), strict=True)

    def _shape(self, content: dict[str, Any]) -> RecurrentLanguageConfig:
        names = RecurrentLanguageConfig.field_names()
        known = names | _PARTS | {"family", "model_type"}
        reasons = [f"{self.config.name}: {name!r} is not known" for name in content if name not in known]
        try:
            shape = json.dumps(_chosen(content, names))
            config = TypeAdapter(RecurrentLanguageConfig).validate_json(shape, strict=True)
            reasons += [f"{self.config.name}: {problem}" for problem in config.problems()]
        except ValidationError as error:
            reasons += reasons_of(error, self.config.name)
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)
        return config


def _chosen(content: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name in names}


def _measured(tensors: dict[str, Tensor], parts: RecurrentLanguageParts, coupled: bool) -> dict[str, Any]:
    """What the weights say of their shape."""
    table, recurrence = tensors[f"{parts.embedding}.weight"], tensors[f"{parts.rnn}.weight_hh_l0"]
    output = tensors.get(f"{parts.output}.weight")
    layer = re.compile(re.escape(parts.rnn) + r"\.weight_hh_l\d+")
    gates = recurrence.shape[0] // recurrence.shape[-1]
    return {
        "vocab_size": table.shape[0],
        "embedding_width": table.shape[-1],
        "width": recurrence.shape[-1],
        "layers": sum(layer.fullmatch(name) is not None for name in tensors),
        "cell": {4: "lstm", 3: "lstm" if coupled else "gru"}.get(gates, "rnn_tanh"),
        "tie_output": output is None or torch.equal(output, table),
        "output_bias": f"{parts.output}.bias" in tensors,
    }


def _their_name(name: str, parts: RecurrentLanguageParts) -> str:
    """Of one of our tensors."""
    layer = _LAYER.fullmatch(name)
    if layer:
        return f"{parts.rnn}.{layer[2]}_l{layer[1]}"
    part, _, last = name.partition(".")
    return f"{getattr(parts, part)}.{last}"


def _ours(tensors: dict[str, Tensor], config: RecurrentLanguageConfig, theirs: dict[str, str]) -> dict[str, Tensor]:
    """Their tensors by our names; those that have none keep their own."""
    ours = {name: mine for mine, name in theirs.items()}
    found = {ours.get(name, name): tensor for name, tensor in tensors.items()}
    if config.tie_output:  # stored once, wanted under both names
        found.setdefault("output.weight", found["embedding.weight"])
    if not any(".bias_" in name for name in found):  # bias=False
        gates = {name: len(tensor) for name, tensor in found.items() if name.endswith(("weight_ih", "weight_hh"))}
        found |= {name.replace(".weight_", ".bias_"): torch.zeros(count) for name, count in gates.items()}
    return found
