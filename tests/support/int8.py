"""An exported model in 8 bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from converters.precision import to_int8
from serving.manifest import MANIFEST_FILE
from tests.support.marian_shape import MarianShape


def in_int8(model: MarianShape, folder: Path) -> MarianShape:
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    manifest, _ = to_int8(folder, model.manifest)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return replace(model, folder=folder, manifest=manifest)
