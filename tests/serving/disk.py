"""Versions on disk that are whole, but compute nothing."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from beamline.serving.contract.manifest import MANIFEST_FILE, Manifest
from tests.serving.doubles import small_manifest

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "hello", "world"]


def write_version(root: Path, name: str = "de", version: int = 1, **changes: Any) -> Path:
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    graphs: dict[str, dict[str, str]] = {}
    for graph in ("encoder", "step", "score"):
        graphs[graph] = {"file": f"{graph}.onnx", "sha256": _write(folder / f"{graph}.onnx", graph.encode())}
    weights = b"weights" * 100
    _word_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = {"file": "tokenizer.json", "sha256": _sha256((folder / "tokenizer.json").read_bytes())}
    content: dict[str, Any] = {
        **small_manifest().model_dump(mode="json"),
        "name": name,
        "version": version,
        "graphs": graphs,
        "weights": {
            "file": "weights.bin",
            "sha256": _write(folder / "weights.bin", weights),
            "bytes": len(weights),
        },
        "tokenizers": {"source": tokenizer, "target": tokenizer},
        **changes,
    }
    (folder / MANIFEST_FILE).write_text(Manifest.model_validate(content).to_json(), encoding="utf-8")
    return folder


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As a folder is whose permissions let nobody look into it; whoever runs the tests may be root, whom none stop."""
    stat = Path.stat

    def refused(path: Path, **options: bool) -> os.stat_result:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return _sha256(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer
