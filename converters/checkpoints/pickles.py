"""Checkpoints of other toolkits, which lie beside their training's options in one pickle. No code of it is run: beside
tensors, only what is named here may be made."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beamline.serving.errors import ConversionError

_SCALAR = np._core.multiarray.scalar  # type: ignore[attr-defined]
# Options, and the numbers of a training's history. Older pickles name numpy's function by its former place.
_ALLOWED: list[Any] = [
    argparse.Namespace,
    np.dtype,
    np.dtypes.Float32DType,
    np.dtypes.Float64DType,
    np.dtypes.Int64DType,
    _SCALAR,
    (_SCALAR, "numpy.core.multiarray.scalar"),
]


def read_pickle(path: Path, hint: str) -> dict[str, Any]:
    """`hint` says what to do with a file that can't be read so."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            # What is not asked for, such as an optimiser's state, is not read from the disk.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of any kind: the file is a user's
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        unsafe = _named_global(str(error))
        reason = f"it holds {unsafe}, and no code of a checkpoint is run" if unsafe else first
        raise ConversionError(f"{path} can't be read: {reason}. {hint}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} can't be read: it must hold a dict, not {type(content).__name__}. {hint}")
    return content


def _named_global(message: str) -> str:
    """The class that torch refused to make, out of its sentence."""
    _, found, rest = message.partition("Unsupported global: GLOBAL ")
    return rest.split(" ")[0] if found else ""


def options_of(value: Any) -> dict[str, Any]:
    """A Namespace, or what configuration libraries leave of theirs: dicts in dicts, whose names are joined."""
    values = vars(value) if isinstance(value, argparse.Namespace) else dict(value or {})
    flat: dict[str, Any] = {}
    for name, each in values.items():
        if isinstance(each, dict) and name in ("encoder", "decoder", "quant_noise"):
            flat |= {f"{name}_{inner}": found for inner, found in each.items()}
        else:
            flat[name] = each
    return flat
