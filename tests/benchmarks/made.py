"""What a benchmark makes once and keeps."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Made under another name first, so that an interrupted run leaves nothing half done. What an older version of the
    code made is removed: it is large, and nobody asks for it again."""
    if folder.is_dir():
        return folder
    print(f"making {folder} ...", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))  # another run may be at it, too
    try:
        make(unfinished)
        if not folder.is_dir():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    kind = folder.name.rpartition("-")[0]
    for old in folder.parent.glob(f"{kind}-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def converters() -> list[Path]:
    """The code that decides what a converted model is."""
    return [*sorted((ROOT / "converters").rglob("*.py")), ROOT / "serving" / "contract" / "manifest.py"]


def hash_of(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
