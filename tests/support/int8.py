"""An exported model in 8 bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from converters.lowering import lower
from serving.manifest import MANIFEST_FILE, Manifest, read_manifest
from tests.support.marian_shape import MarianShape


def write_int8(exported: Path, folder: Path) -> Manifest:
    """Writes the 8-bit form of an exported version into `folder`."""
    shutil.copytree(exported, folder, dirs_exist_ok=True)
    manifest, _ = lower(folder, read_manifest(folder), "int8")
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def in_int8(model: MarianShape, folder: Path) -> MarianShape:
    return replace(model, folder=folder, manifest=write_int8(model.folder, folder))
