"""What a page takes for granted that its reader has: texts, and a checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

PAIRS = {
    "Save the file.": "Die Datei speichern.",
    "Open the window.": "Öffnen Sie das Fenster.",
    "Close the window.": "Schließen Sie das Fenster.",
    "The file could not be opened.": "Die Datei konnte nicht geöffnet werden.",
}
_ENGLISH, _GERMAN = list(PAIRS), list(PAIRS.values())
_TEXTS = {
    "book.txt": _ENGLISH,
    "lines.en": _ENGLISH,
    "lines.de": _GERMAN,
    "train.en": 20 * _ENGLISH,
    "train.de": 20 * _GERMAN,
    "trace.jsonl": [json.dumps({"time": number / 10, "text": text}) for number, text in enumerate(_ENGLISH)],
}
CHECKPOINT = "opus-mt-en-de"
CONVERTED = "my_models/opus/1"  # where the pages convert it to


@dataclass(frozen=True)
class Belongings:
    marian: Path  # a directory as OPUS-MT's are
    converted: Path  # and the version that it becomes

    def put_into(self, folder: Path, *, converted: bool) -> None:
        """`converted`: the conversion, which takes too long for every run, has been done."""
        for name, lines in _TEXTS.items():
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        shutil.copytree(self.marian, folder / CHECKPOINT)
        if converted:
            shutil.copytree(self.converted, folder / CONVERTED)
            rename(folder / CONVERTED, "opus")


def rename(version: Path, name: str) -> None:
    """A model's folder has the name that its manifest says."""
    manifest = version / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "name": name}))
