"""docs/from-ctranslate2.md names every parameter that CTranslate2 has, and no option of ours that does not exist."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from typing import get_type_hints

import pytest

from beamline import load, types
from tests.benchmarks.environments import python_of
from tests.support.processes import ROOT

PAGE = (ROOT / "docs/from-ctranslate2.md").read_text(encoding="utf-8")
# Which part of the page has the parameters of which method.
SECTIONS = {
    "## Loading": ["Translator.__init__", "Generator.__init__"],
    "## `Translator.translate_batch`": ["Translator.translate_batch"],
    "## `Generator.generate_batch`": ["Generator.generate_batch"],
    "## `score_batch`": ["Translator.score_batch", "Generator.score_batch"],
}
_PARAMETERS = """
import ctranslate2, json, re, sys
found = {}
for name in json.loads(sys.argv[1]):
    kind, method = name.split(".")
    signature = getattr(getattr(ctranslate2, kind), method).__doc__.split("->")[0]  # all that a native method has of it
    found[name] = [each for each in re.findall(r"(\\w+): ", signature) if each != "self"]
print(json.dumps(found))
"""


def section(title: str) -> str:
    return PAGE[PAGE.index(title) :].split("\n## ", 1)[0]


def words(column: int, text: str) -> set[str]:
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {word for row in rows if len(row) > column for word in re.findall(r"`(\w+)", row[column])}


@pytest.mark.full  # makes CTranslate2's environment
def test_every_parameter_of_ctranslate2_has_its_line() -> None:
    names = [name for methods in SECTIONS.values() for name in methods]
    done = subprocess.run(
        [python_of("ctranslate2"), "-c", _PARAMETERS, json.dumps(names)], capture_output=True, text=True, check=True
    )
    parameters = json.loads(done.stdout)
    assert parameters["Translator.translate_batch"]
    for title, methods in SECTIONS.items():
        known = words(0, section(title))
        for name in methods:
            assert set(parameters[name]) - known == set(), name


@pytest.mark.parametrize(
    ("title", "kinds"),
    [
        ("## `Translator.translate_batch`", (types.TranslateOptions, types.GenerateOptions)),
        ("## `Generator.generate_batch`", (types.GenerateOptions,)),
    ],
)
def test_every_option_of_ours_exists(title: str, kinds: tuple[type, ...]) -> None:
    options = {name for kind in kinds for name in get_type_hints(kind)}
    fields = {name for value in vars(types).values() if isinstance(value, type) for name in get_type_hints(value)}
    arguments = set(inspect.signature(load).parameters)
    others = {"TokenIds", "True", "False", "model", "translate_stream", "generate_stream", "score", "shortlist"}
    others |= {
        "bad_words",
        "beamline",
        "translate",
        "translate_iterable",
        "never",
        "max_length",
        "include_prompt_in_result",
    }
    assert words(1, section(title)) - options - fields - arguments - others == set()
