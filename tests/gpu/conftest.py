"""What the tests that need a GPU share. They have not been run on one yet; see docs/gpu.md.
`tests/serving/backends/test_cuda.py` runs the same functions over an emulated CUDA."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from beamline.converters.passes.lowering import lower
from beamline.converters.tensorrt.library import find_library
from beamline.converters.tensorrt.version import Wanted, build_version
from beamline.serving.backends.factory import Made, make_backend, make_pooled
from beamline.serving.backends.selection import Choice, choose, look
from beamline.serving.contract.backend import PooledBackend
from beamline.serving.contract.manifest import (
    PRECISIONS,
    AnyManifest,
    Manifest,
    PooledManifest,
    read_any_manifest,
    read_manifest,
)
from beamline.serving.errors import BeamlineError
from tests.support.marian_shape import MarianShape
from tests.support.shipped import shipped

BUCKETS, SLOTS = (64, 256), 32
MODELS = ("en-de", "en-de-gru", "language")  # 8 bits; recurrent, by cuDNN; with prompts


@dataclass(frozen=True)
class ModelOnGpu:
    """Any model that decodes, as it is."""

    folder: Path
    manifest: Manifest
    choice: Choice

    def backend(self) -> Made:
        return make_backend(self.folder, self.manifest, 1, self.choice, self.choice.devices[0], {})


@dataclass(frozen=True)
class OnGpu(ModelOnGpu):
    """A small Marian as one kind of device runs it, beside the float32 version that the CPU runs."""

    reference: MarianShape


@dataclass(frozen=True)
class PooledOnGpu:
    """A small classifier."""

    folder: Path
    manifest: PooledManifest
    choice: Choice

    def backend(self) -> PooledBackend:
        return make_pooled(self.folder, self.manifest, 1, self.choice, SLOTS, {})


def chosen(kind: str) -> Choice:
    """`tensorrt_rtx` also where `tensorrt` is there, which a server takes then."""
    try:
        choice = choose("tensorrt" if kind == "tensorrt_rtx" else kind, look())
    except BeamlineError as error:
        pytest.fail(f"`make test-gpu` needs all of it: {error}", pytrace=False)
    if kind != "tensorrt_rtx":
        return choice
    capability = choice.devices[0].capability
    if (
        not look().has("tensorrt-rtx")
        or f"SM{capability}" not in find_library(kind).module.ComputeCapability.__members__
    ):
        pytest.skip(f"tensorrt-rtx is not here, or knows no GPU of compute capability {capability}")
    return replace(choice, library=kind)


def build_plans(folder: Path, manifest: AnyManifest, choice: Choice) -> None:
    if choice.kind == "tensorrt":
        wanted = Wanted((choice.devices[0].capability,), BUCKETS, slots=SLOTS)
        build_version(folder, manifest, find_library(choice.library), wanted, lambda outcome: None)


@pytest.fixture(
    scope="session",
    params=[(kind, each) for kind in ("cuda", "tensorrt") for each in PRECISIONS],
    ids=lambda pair: "-".join(pair),
)
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnGpu:
    kind, precision = request.param
    choice = chosen(kind)  # before anything is exported
    model: MarianShape = request.getfixturevalue("plain_model")
    folder = tmp_path_factory.mktemp(f"{kind}-{precision}") / "version"
    shutil.copytree(model.folder, folder)
    manifest = model.manifest
    if precision != "float32":
        manifest, _ = lower(folder, manifest, precision)
    build_plans(folder, manifest, choice)
    return OnGpu(folder, manifest, choice, model)


@pytest.fixture(
    scope="session",
    params=[(kind, each) for kind in ("cuda", "tensorrt", "tensorrt_rtx") for each in MODELS],
    ids=lambda pair: "-".join(pair),
)
def model_on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelOnGpu:
    kind, model = request.param
    choice = chosen(kind)
    folder = tmp_path_factory.mktemp(f"{kind}-{model}") / "version"
    original = shipped(model) if model != "language" else request.getfixturevalue("language_model").folder
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("engines"))
    manifest = read_manifest(folder)
    build_plans(folder, manifest, choice)
    return ModelOnGpu(folder, manifest, choice)


@pytest.fixture(scope="session", params=["cuda", "tensorrt"])
def pooled_on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PooledOnGpu:
    choice = chosen(request.param)
    repository: Path = request.getfixturevalue("pooled_repository")
    folder = tmp_path_factory.mktemp(request.param) / "version"
    shutil.copytree(repository / "mood" / "1", folder)
    manifest = read_any_manifest(folder)
    assert isinstance(manifest, PooledManifest)
    build_plans(folder, manifest, choice)
    return PooledOnGpu(folder, manifest, choice)
