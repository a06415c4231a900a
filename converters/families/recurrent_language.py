"""Recurrent language models built on `torch.nn.RNN`, `LSTM` or `GRU`, or on an LSTM that torch.nn does not have.

A folder with `config.json` (family "recurrent_language"; the fields of `RecurrentLanguageConfig`, and below), weights
under the names `embedding`, `rnn` and `output` or under those that the config gives, and a tokenizer. Layers are named
as torch.nn names them: `rnn.weight_ih_l0`. With coupled gates, the gates are f g o; with peepholes, `rnn.peephole_l0`
holds a row for each of i f o, or f o.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from converters.base import Converter, Loaded
from converters.checkpoint import fill, read_json, read_weights, reasons_of
from converters.families.tokenizer_file import read_tokenizer
from converters.modules.recurrent_language import (
    RecurrentLanguageConfig,
    RecurrentLanguageModel,
    RecurrentLanguageSteps,
)
from serving.errors import UnsupportedCheckpoint
from serving.manifest import DecodingDefaults, Limits, Vocabulary

FAMILY = "recurrent_language"
MAX_BEAM_SIZE = 16
_LAYER = re.compile(r"layers\.(\d+)\.cells\.0\.(\w+)")


@dataclass(frozen=True)
class Parts:
    """What a checkpoint calls its parts, and the files beside it."""

    embedding: str = "embedding"
    rnn: str = "rnn"
    output: str = "output"
    tokenizer: str = "tokenizer.json"  # or a sentencepiece model
    description: str = ""


class RecurrentLanguageConverter(Converter):
    family = FAMILY

    def __init__(self, source: Path, config: Path) -> None:
        super().__init__(source)
        self.config = config

    def load(self) -> Loaded:
        config, parts = self._read(read_json(self.config))
        model = RecurrentLanguageModel(config)
        theirs = {name: _their_name(name, parts) for name in model.state_dict()}
        fill(model, _ours(read_weights(self.source), config, theirs), str(self.source), theirs)
        model.eval()
        text = read_tokenizer(self.source / parts.tokenizer, add_eos=False)  # a prompt goes on
        limits = Limits(
            max_source_length=config.max_positions - 1,
            max_target_length=config.max_positions,
            max_beam_size=min(MAX_BEAM_SIZE, config.vocab_size // 4),
        )
        return Loaded(
            model=RecurrentLanguageSteps(model).eval(),
            original=model,
            source_text=text,
            target_text=text,
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

    def _read(self, content: dict[str, Any]) -> tuple[RecurrentLanguageConfig, Parts]:
        names = {field.name for field in fields(Parts)}
        known = RecurrentLanguageConfig.field_names() | names | {"family", "model_type"}
        reasons = [f"{self.config.name}: {name!r} is not known" for name in content if name not in known]
        shape = {name: value for name, value in content.items() if name in RecurrentLanguageConfig.field_names()}
        beside = {name: value for name, value in content.items() if name in names}
        try:
            config = TypeAdapter(RecurrentLanguageConfig).validate_json(json.dumps(shape), strict=True)
            parts = TypeAdapter(Parts).validate_json(json.dumps(beside), strict=True)
            reasons += [f"{self.config.name}: {problem}" for problem in config.problems()]
        except ValidationError as error:
            reasons += reasons_of(error, self.config.name)
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)
        return config, parts


def _their_name(name: str, parts: Parts) -> str:
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
        names = ("embedding.weight", "output.weight")
        found = {**{name: found[stored] for stored in names if stored in found for name in names}, **found}
    if not any(".bias_" in name for name in found):  # bias=False
        gates = {name: len(tensor) for name, tensor in found.items() if name.endswith(("weight_ih", "weight_hh"))}
        found |= {name.replace(".weight_", ".bias_"): torch.zeros(count) for name, count in gates.items()}
    return found
