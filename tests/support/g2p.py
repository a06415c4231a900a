"""The package g2p-en beside its converted model."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import TracebackType
from typing import Any

from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.families import converter_for
from tests.benchmarks.environments import python_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "g2p"


def english_words(count: int) -> list[str]:
    """Different ones, as they come in Python's documentation, short and long; the same ones every time."""
    words = re.findall(r"[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
    different = list(dict.fromkeys(word for word in words if len(word) <= 30))
    assert len(different) >= count
    return different[:count]


@dataclass(frozen=True)
class Predicted:
    phonemes: list[list[str]]
    seconds: float


class Package:
    """The package itself, in a process and an environment of its own."""

    def __init__(self) -> None:
        worker = ROOT / "tests" / "benchmarks" / "peers" / "g2p_en_worker.py"
        self._process = subprocess.Popen(
            [python_of("g2p_en"), str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        about = self._read()
        self.version, self.weights = str(about["version"]), Path(about["weights"])

    def predict(self, words: list[str]) -> Predicted:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return Predicted(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


def convert_g2p(weights: Path, repository: Path) -> Path:
    own = OwnFiles(weights, EXAMPLE / "graphemes.json", EXAMPLE / "phonemes.json")
    converter_for(EXAMPLE / "model.py:build", own=own).convert("g2p", repository)
    return repository / "g2p" / "1"
