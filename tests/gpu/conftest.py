"""What the tests that need a GPU share. They have not been run yet; see docs/gpu.md."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from converters.lowering import lower
from converters.tensorrt.library import find_library
from converters.tensorrt.version import Wanted, build_version
from serving.backends.make import Made, make_backend
from serving.devices import Choice, choose, look
from serving.errors import BeamlineError
from serving.manifest import Manifest
from tests.support.marian_shape import MarianShape


@dataclass(frozen=True)
class OnGpu:
    """A small Marian as one kind of device runs it, beside the float32 version that the CPU runs."""

    reference: MarianShape
    folder: Path
    manifest: Manifest
    choice: Choice

    def backend(self) -> Made:
        return make_backend(self.folder, self.manifest, 1, self.choice, self.choice.devices[0], {})


@pytest.fixture(
    scope="session",
    params=[(kind, precision) for kind in ("cuda", "tensorrt") for precision in ("float32", "float16", "bfloat16")],
    ids=lambda pair: "-".join(pair),
)
def on_gpu(request: pytest.FixtureRequest, plain_model: MarianShape, tmp_path_factory: pytest.TempPathFactory) -> OnGpu:
    kind, precision = request.param
    try:
        choice = choose(kind, look())
    except BeamlineError as error:
        pytest.fail(f"`make test-gpu` needs all of it: {error}")
    folder = tmp_path_factory.mktemp(f"{kind}-{precision}") / "version"
    shutil.copytree(plain_model.folder, folder)
    manifest = plain_model.manifest
    if precision != "float32":
        manifest, _ = lower(folder, manifest, precision)
    if kind == "tensorrt":
        library = find_library(choice.library)
        wanted = Wanted((choice.devices[0].capability,), (64, 256), slots=32)
        build_version(folder, manifest, library, wanted, lambda outcome: None)
    return OnGpu(plain_model, folder, manifest, choice)
