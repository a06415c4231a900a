"""Reading what a user brings, without ever running code from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from beamline.serving.errors import ConversionError, UnsupportedCheckpoint

Parts = TypeVar("Parts", bound=BaseModel)

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
WEIGHT_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConversionError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object")
    return content


def read_weights(folder: Path, names: tuple[str, ...] = WEIGHT_FILES) -> dict[str, Tensor]:
    """All tensors in float32, from the first of these files that is there. A pickle is read for its tensors only, and
    one inside an .npz not at all."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ConversionError(f"{folder} has no weights: expected one of {', '.join(names)}")
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                tensors = {name: torch.from_numpy(arrays[name]) for name in arrays}
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConversionError(f"{path} can't be read as weights: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise ConversionError(f"{path} can't be read as weights: it must hold tensors by their names")
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def named_weights(folder: Path, name: str | None) -> tuple[str, ...]:
    """The file that a parts file names for `read_weights`; where it names none, the usual one or the only one."""
    if name is not None:
        return (name,)
    found = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    usual = [each for each in WEIGHT_FILES if each in found]
    if len(found) > 1 and not usual:
        raise ConversionError(f'{folder} has several files of weights; "weights" must name one of {", ".join(found)}')
    return tuple(usual or found) or WEIGHT_FILES


def fill(module: nn.Module, tensors: Mapping[str, Tensor], what: str, theirs: Mapping[str, str] | None = None) -> None:
    """Loads them into the module; every tensor that is missing, left over or of another shape is named: as a user
    calls it, where `theirs` has a name for one of ours."""
    expected, called = module.state_dict(), theirs or {}
    reasons = [f"{called.get(name, name)} is missing" for name in expected if name not in tensors]
    reasons += [f"{name} is not a part of this architecture" for name in tensors if name not in expected]
    reasons += [
        f"{called.get(name, name)} has shape {list(tensors[name].shape)}, "
        f"but its configuration says {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if reasons:
        raise UnsupportedCheckpoint(what, reasons)
    module.load_state_dict(dict(tensors))


def read_parts(kind: type[Parts], path: Path) -> Parts:
    """A config that names a checkpoint's parts, or every reason against it."""
    with every_reason(path):
        return kind.model_validate(read_json(path))


@contextmanager
def every_reason(what: Path) -> Iterator[None]:
    """What pydantic finds wrong is a reason against the checkpoint."""
    try:
        yield
    except ValidationError as error:
        raise UnsupportedCheckpoint(str(what), reasons_of(error)) from error


def reasons_of(error: ValidationError, of: str = "") -> list[str]:
    """Each problem that pydantic found, as a sentence; `of` says in what."""
    reasons = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        reasons.append(": ".join(part for part in (of, where, problem["msg"]) if part))
    return reasons
