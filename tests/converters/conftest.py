"""One checkpoint that is really exported, once; and conversions that copy its graphs instead of exporting them anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.export import ExportedProgram

from beamline.converters.certificate.verify import Certificate, Tolerance
from beamline.converters.conversion import PARITY_FILE
from beamline.converters.export import ExportedFiles
from beamline.converters.tasks import generation
from beamline.serving.contract.manifest import read_manifest
from tests.support.checkpoints import convert_reference_source, write_reference_source
from tests.support.fixture_cache import fixture_cache


@pytest.fixture(scope="session")
def reference_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def reference_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`reference_source`, converted. Not to be changed."""
    repository = fixture_cache().fill(tmp_path_factory.mktemp("repository"), convert_reference_source)
    return repository / "reference" / "1"


@pytest.fixture
def copied_graphs(reference_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of `reference_source` take a second or two: they only verify."""
    manifest = read_manifest(reference_version)

    def copy(model: object, constants: object, folder: Path, advance: Callable[[str], None]) -> ExportedFiles:
        for name in ("encoder", "step", "score"):
            advance(f"export {name}")
            shutil.copy(reference_version / f"{name}.onnx", folder)
        shutil.copy(reference_version / manifest.weights.file, folder)
        return ExportedFiles(manifest.graphs, manifest.weights)

    monkeypatch.setattr(generation, "export_graphs", copy)


@pytest.fixture
def quick_conversion(copied_graphs: None, reference_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They don't even verify: for tests of what happens around it."""
    content = json.loads((reference_version / PARITY_FILE).read_text())
    certificate = Certificate(**{**content, "tolerance": Tolerance(**content["tolerance"])})
    monkeypatch.setattr(generation, "verify", lambda *_: certificate)


@pytest.fixture
def traced_again(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs whose operators were replaced, by tracing them once more."""
    programs: list[ExportedProgram] = []
    decompose: Callable[..., ExportedProgram] = ExportedProgram.run_decompositions

    def note(program: ExportedProgram, table: dict[object, object]) -> ExportedProgram:
        programs.append(program)
        return decompose(program, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", note)
    return programs
