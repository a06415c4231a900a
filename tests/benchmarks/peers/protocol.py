"""How a worker talks: one JSON object a line, a question on standard input and its answer on standard output.

Runs in every peer's environment, so it imports nothing but Python's own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Question:
    """Translate these sentences, all of them at once, into exactly `target_length` tokens each."""

    source: list[list[int]]
    beam: int
    target_length: int


def take_stdout() -> TextIO:
    """The pipe to whoever asks; what libraries print goes to standard error from now on."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, about: dict[str, Any], answer: Callable[[Question], dict[str, Any]]) -> None:
    """Says hello with `about`, then answers until standard input ends."""
    _write(answers, about)
    for line in sys.stdin:
        content = json.loads(line)
        found = answer(Question(content["source"], content["beam"], content["target_length"]))
        _write(answers, {**found, "rss_mb": resident_mb()})


def resident_mb() -> float:
    """What the process holds now; where the system doesn't say, the most that it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()
