"""What a GGUF file says and transformers does not read: such a model would be another one, without a word."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from beamline.serving.errors import ConversionError

_INSTEAD = "which transformers does not read from GGUF files; convert its Hugging Face directory instead"


def unread(path: Path) -> list[str]:
    try:
        reader = GGUFReader(path)
    except Exception as error:  # of any kind: the file is a user's
        raise ConversionError(f"{path} can't be read as a GGUF file: {error}") from error
    reasons = []
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        reasons.append(f"it has rotary frequencies of its own (rope_freqs.weight), {_INSTEAD}")
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            reasons.append(f"{name} is {field.contents()!r}, {_INSTEAD}")
        elif name.endswith(".attention.sliding_window"):
            reasons.append(f"{name} is {field.contents()}, {_INSTEAD}")
    return reasons
