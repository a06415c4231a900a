"""The registry of families: each model type has one, and every family says what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from beamline.converters.checkpoints.source import Source
from beamline.converters.families import any_converter_for, families
from beamline.converters.families.llama import LlamaConverter

FAMILIES = families()


def test_every_model_type_has_one_family() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types)) > 10
    assert {"marian", "gpt2", "llama", "mistral", "qwen2", "torch_transformer"} <= set(types)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_family_says_what_it_is_for(family: type) -> None:
    """A line of a table."""
    description: str = family.description  # type: ignore[attr-defined]
    assert 10 < len(description) < 120
    assert not {"\n", "|"} & set(description)


def test_one_file_per_family() -> None:
    folder = Path(sys.modules["beamline.converters.families"].__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files == {family.__module__.rpartition(".")[2] for family in FAMILIES}


def test_kin_share_a_converter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert Source(tmp_path).model_type == "qwen2"
    assert isinstance(any_converter_for(tmp_path), LlamaConverter)


def test_the_registry_is_light() -> None:
    """Torch is imported with the families, and transformers only with a checkpoint of theirs: both take seconds."""
    code = (
        "import sys, beamline.converters.families as f; assert 'torch' not in sys.modules;"
        "f.families(); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
