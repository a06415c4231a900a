"""What a user brings to be converted, before any family has looked at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from beamline.converters.checkpoints.files import read_json
from beamline.serving.errors import ConversionError


@dataclass(frozen=True)
class OwnFiles:
    """What lies beside one's own module."""

    weights: Path | None = None
    tokenizer: Path | None = None
    target_tokenizer: Path | None = None


@dataclass(frozen=True)
class Source:
    path: Path
    config: Path | None = None  # a file that names the checkpoint's parts, where it is not ours
    own: OwnFiles = OwnFiles()

    @property
    def config_file(self) -> Path:
        return self.config or self.path / "config.json"

    @cached_property
    def model_type(self) -> Any:
        """What the checkpoint says that it is: the family that its config names, the model type of `config.json`, or a
        GGUF file's architecture. Raises a `ConversionError` where there is nothing that could say it."""
        if self.own != OwnFiles():
            raise ConversionError(
                f"--weights and --tokenizer are for one's own module (file.py:build); {self.path} is none"
            )
        if self.path.suffix == ".gguf" and self.path.is_file():
            from beamline.converters.checkpoints.gguf import architecture  # only now: its package may be missing

            return architecture(self.path)
        if not self.path.exists():
            raise ConversionError(f"{self.path} does not exist{_download_hint(self.path)}")
        if not self.path.is_dir():
            beside = "; convert the folder that it lies in" if self.path.suffix == ".pt" else ""
            raise ConversionError(f"{self.path} is neither a folder with a checkpoint nor a GGUF file{beside}")
        if not self.config_file.exists() and self.config is None and (toolkit := _toolkit_of(self.path)):
            return toolkit
        content = read_json(self.config_file)
        return content.get("family") or content.get("model_type")


def _toolkit_of(folder: Path) -> str | None:
    """Of a folder that has no configuration, because the pickle in it holds all: fairseq keeps its words beside it."""
    if not any(folder.glob("*.pt")):
        return None
    return "fairseq" if any(folder.glob("dict*.txt")) else "opennmt_py"


def _download_hint(path: Path) -> str:
    """For what looks like a name on a model hub."""
    hub = str(path).partition("huggingface.co/")[2]  # an address: a path has lost one of its slashes
    if hub.count("/") >= 1:
        path = Path(*hub.split("/")[:2])
    elif path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..") or path.parent.exists():
        return ""
    return (
        f"; if it is a model's name on the Hugging Face hub, download it first: "
        f"hf download {path} --local-dir {path.name}, and convert {path.name}"
    )
