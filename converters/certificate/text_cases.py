"""Real text as requests: lines that a user gave, or the documentation that comes with Python."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

from beamline.converters.certificate.graph_runner import Case
from beamline.serving.contract.manifest import Manifest
from beamline.serving.text.tokenizer import TextTokenizer

_DOCUMENTATION_LINES = 32
_SHORTEST = 40  # characters of a line of documentation that is taken for a sentence


def text_cases(folder: Path, manifest: Manifest, lines: Iterable[str], most: int) -> list[Case]:
    """The first of these lines that are neither empty nor too long for the model, by its own tokenizer."""
    tokenizer = TextTokenizer.load(folder / manifest.tokenizers.source.file)
    longest = longest_text(manifest)
    start = () if manifest.task == "generate" else (manifest.vocabulary.start_id,)
    encoded = (tuple(tokenizer.encode(line)) for line in lines if line.strip())
    fitting = islice((ids for ids in encoded if 0 < len(ids) <= longest), most)
    return [Case(ids, start) if start else Case((), ids) for ids in fitting]


def documentation_cases(folder: Path, manifest: Manifest) -> list[Case]:
    """None for a model that reads no text."""
    if manifest.feature_width:
        return []
    lines = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
    sentences = (line for line in lines if len(line) >= _SHORTEST and line[0].isalpha())
    return text_cases(folder, manifest, sentences, _DOCUMENTATION_LINES)


def longest_text(manifest: Manifest) -> int:
    return min(manifest.limits.max_source_length, manifest.limits.max_target_length - 2)
