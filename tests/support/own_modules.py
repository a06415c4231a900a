"""One's own module as files of a user's, and the command that converts it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from beamline.serving.cli import main
from examples.own_module.train import tokenizers


def convert(folder: Path, source: str, *more: str) -> int:
    files = ["--weights", str(folder / "weights.safetensors"), "--tokenizer", str(folder / "source.json")]
    files += ["--target-tokenizer", str(folder / "target.json"), "--name", "own", "--repo", str(folder / "repository")]
    return main(["convert", source, *files, *more])


def write_module(folder: Path, code: str) -> None:
    """Its code, with random weights that fit the module of test_protocol.py."""
    (folder / "model.py").write_text(code)
    shapes = {"words.weight": (13, 8), "output.weight": (13, 8), "output.bias": (13,)}
    shapes |= {"cell.weight_ih": (24, 8), "cell.weight_hh": (24, 8), "cell.bias_ih": (24,), "cell.bias_hh": (24,)}
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "weights.safetensors")
    for name, tokenizer in zip(("source", "target"), tokenizers(), strict=True):
        tokenizer.save(str(folder / f"{name}.json"))
