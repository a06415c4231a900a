"""GGUF files, which transformers reads: what they are, and what it does not read of them. A model without that would be
another one, without a word."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from beamline.serving.errors import ConversionError
from beamline.version import install_hint

_INSTEAD = "which transformers does not read from GGUF files; convert its Hugging Face directory instead"


def architecture(path: Path) -> str:
    field = _reader(path).fields.get("general.architecture")
    if field is None:
        raise ConversionError(f"{path} does not say its architecture (general.architecture)")
    return str(field.contents())


def unread(path: Path) -> list[str]:
    reader = _reader(path)
    reasons = []
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        reasons.append(f"it has rotary frequencies of its own (rope_freqs.weight), {_INSTEAD}")
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            reasons.append(f"{name} is {field.contents()!r}, {_INSTEAD}")
        elif name.endswith(".attention.sliding_window"):
            reasons.append(f"{name} is {field.contents()}, {_INSTEAD}")
    return reasons


def _reader(path: Path) -> Any:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        packages = " and ".join(missing)
        raise ConversionError(f"{path} is a GGUF file; to read it, install {packages}: {install_hint('gguf')}")
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # of any kind: the file is a user's
        raise ConversionError(f"{path} can't be read as a GGUF file: {error}") from error
