"""What the configs that name the parts of a torch.nn encoder-decoder have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class SequenceParts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    family: str
    weights: str = "model.safetensors"
    tokenizer: str = "spm.model"
    target_embedding: str
    output: str
    output_bias: str | None = None
    max_positions: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    source_eos: bool = True
    decoding: dict[str, Any] = {}
    source_language: str | None = None
    target_language: str | None = None
    description: str = ""
