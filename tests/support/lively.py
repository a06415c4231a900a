"""A complete Marian directory whose translations depend on the source, vary, and end by themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.marian import write_marian_directory
from tests.support.processes import run_beamline

MAX_LENGTH = 256
DEFAULT_LENGTH = 48
_EOS, _EOS_BIAS = 0, 3.5


def write_lively_marian(path: Path) -> Path:
    write_marian_directory(
        path,
        config={"max_position_embeddings": MAX_LENGTH, "tie_word_embeddings": False},
        max_length=DEFAULT_LENGTH,
    )
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name == "final_logits_bias":
            tensor.zero_()
            tensor[0, _EOS] = _EOS_BIAS  # so that sentences end after a while
        elif tensor.dim() > 1 and "embed_positions" not in name:
            tensor.normal_(std=_spread(name), generator=generator)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def convert_lively_marian(repository: Path) -> None:
    """The same as version 1 of `tiny`, converted by the real command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_lively_marian(Path(folder) / "marian")
        converted = run_beamline("convert", str(source), "--name", "tiny", "--repo", str(repository))
        assert converted.returncode == 0, converted.stderr


def _spread(name: str) -> float:
    if "lm_head" in name:
        return 0.4
    if "embed" in name or "shared" in name or "encoder_attn.out_proj" in name:
        return 0.2
    return 0.1
