"""Reading a checkpoint by transformers, which runs no code from it and is the original that the parity check compares
with. It takes seconds to import, so it is imported only where a checkpoint is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from beamline.serving.errors import ConversionError, UnsupportedCheckpoint

# What Hugging Face calls them -> what we call them.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
MAX_BEAM_SIZE = 16
Read = TypeVar("Read")


@dataclass(frozen=True)
class Checkpoint:
    """A directory, or a GGUF file, which transformers dequantises."""

    path: Path

    def config(self) -> Any:
        from transformers import AutoConfig

        return self._read(AutoConfig.from_pretrained)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._read(AutoTokenizer.from_pretrained)

    def model(self, kind: Any, stored_under: Callable[[Any, str], str | None] = lambda config, name: None) -> Any:
        """In float32, ready to be asked; `kind` is one of transformers' classes. Of a tensor that is missing,
        `stored_under` says which other one it is, where a checkpoint shares them and transformers doesn't know."""
        original, found = self._read(
            kind.from_pretrained,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said in our words, with all the others
        )
        weights = original.state_dict()
        shared = {name: stored_under(original.config, name) for name in found["missing_keys"]}
        for name, other in shared.items():
            if other in weights and other not in shared:
                weights[name].copy_(weights[other])
                found["missing_keys"] = set(found["missing_keys"]) - {name}
        self.refuse(_misfits(found))
        return original.eval()

    def refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedCheckpoint(str(self.path), reasons)

    def _read(self, read: Callable[..., Read], **options: Any) -> Read:
        folder = self.path
        if folder.suffix == ".gguf":
            folder, options = folder.parent, {**options, "gguf_file": folder.name}
        try:
            with _silent():
                return read(folder, local_files_only=True, **options)
        except Exception as error:  # of any kind: the files are a user's
            raise ConversionError(f"{self.path} can't be read: {error}") from error


def wrong_kind(config: Any, model_types: tuple[str, ...], endings: tuple[str, ...], what: str) -> list[str]:
    """Reasons that hold for every family: another type, another head, weights in few bits."""
    if config.model_type not in model_types:
        return [f"its model_type is {config.model_type!r}; supported: {', '.join(model_types)}"]
    reasons = [
        f"its architecture is {name}, which is no {what}"
        for name in config.architectures or ()
        if not name.endswith(endings)
    ]
    if getattr(config, "quantization_config", None) is not None:
        reasons.append("its weights are quantised (quantization_config); bring those it was made from, or a GGUF file")
    return reasons


def wrong_activation(config: Any, field: str) -> list[str]:
    value = getattr(config, field)
    return [] if value in ACTIVATIONS else [f"{field} is {value!r}; supported: {', '.join(ACTIVATIONS)}"]


def _misfits(found: Any) -> list[str]:
    """From what transformers says about loading."""
    reasons = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    reasons += [f"{name} is not a part of this architecture" for name in sorted(found["unexpected_keys"])]
    reasons += [
        f"{name} has shape {list(theirs)}, but its configuration says {list(ours)}"
        for name, theirs, ours in sorted(found["mismatched_keys"])
    ]
    return reasons


@contextmanager
def _silent() -> Iterator[None]:
    """Transformers reports on loading at length, and shows bars of its own; what matters is in the reasons."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
