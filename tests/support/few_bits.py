"""An exported model with weights in 8 or in 4 bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from beamline.converters.certificate.graph_runner import Case
from beamline.converters.certificate.precision import TextAgreement
from beamline.converters.certificate.text_cases import documentation_cases
from beamline.converters.passes.calibration import calibrate
from beamline.converters.passes.lowering import lower
from beamline.serving.contract.manifest import MANIFEST_FILE, Manifest, read_manifest
from tests.support.marian_shape import MarianShape


def write_few_bits(exported: Path, folder: Path, precision: str) -> Manifest:
    """Writes such a form of an exported version into `folder`."""
    shutil.copytree(exported, folder, dirs_exist_ok=True)
    manifest, _ = lower(folder, read_manifest(folder), precision)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def write_int8(exported: Path, folder: Path) -> TextAgreement:
    """The same in 8 bits, as a conversion does it: compared on text through the version's own tokenizer."""
    shutil.copytree(exported, folder, dirs_exist_ok=True)
    before = read_manifest(folder)
    manifest, check = lower(folder, before, "int8", documentation_cases(folder, before))
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    assert check.text is not None
    return check.text


def in_few_bits(model: MarianShape, folder: Path, precision: str) -> MarianShape:
    return replace(model, folder=folder, manifest=write_few_bits(model.folder, folder, precision))


def calibrated(model: MarianShape, folder: Path) -> MarianShape:
    """In 8 bits, with fixed scales of activations."""
    manifest = write_few_bits(model.folder, folder, "int8")
    chance = np.random.default_rng(5)
    start = (manifest.vocabulary.start_id,)
    sources = [
        tuple(chance.integers(2, manifest.vocabulary.source_size - 1, length).tolist()) for length in range(2, 34)
    ]
    manifest, _ = calibrate(folder, manifest, [Case(source, start) for source in sources])
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return replace(model, folder=folder, manifest=manifest)
