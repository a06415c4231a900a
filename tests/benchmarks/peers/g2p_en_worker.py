"""g2p-en's own prediction: the path of its weights, then for every line of words (JSON) its phonemes and the time.

The package wants nltk's dictionary and tagger, whose data it would download; its model needs neither, so they are
stood in for before it is imported. What predicts is the package's own code. Runs in its own environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

for name in ("nltk", "nltk.corpus", "nltk.tokenize", "inflect"):
    stand_in: Any = types.ModuleType(name)
    stand_in.__getattr__ = lambda attribute: MagicMock()
    sys.modules[name] = stand_in


def main() -> None:
    from g2p_en import g2p  # type: ignore[import-not-found, unused-ignore]

    model = g2p.G2p()
    weights = Path(g2p.__file__).parent / "checkpoint20.npz"
    about = {"version": f"g2p-en {importlib.metadata.version('g2p-en')}", "weights": str(weights)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        began = time.perf_counter()
        phonemes = [model.predict(word) for word in words]
        seconds = time.perf_counter() - began
        print(json.dumps({"phonemes": phonemes, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
