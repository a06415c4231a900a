"""What the tests over the stub CUDA libraries share: the real ONNX Runtime, and a device that computes nothing.

What a step gives is nonsense, then. Where a search has to go on with it, `plausible` puts other numbers in its place:
here, never in the product."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.serving.backends.factory import make_backend
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.selection import Choice, choose, look
from beamline.serving.contract.manifest import Manifest, read_manifest
from tests.support.cuda_stub.build import ROOT
from tests.support.cuda_stub.plausible import make_plausible
from tests.support.cuda_stub.stub import Stub
from tests.support.shipped import shipped

MADE = ROOT / ".cache" / "cuda-stub" / "models"
MODELS = MADE / "kinds"
EN_DE, EN_DE_GRU = shipped("en-de"), shipped("en-de-gru")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.cuda_stub)


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Counts of this test alone; and nothing may have been asked that CUDA would refuse."""
    if "CUDA_STUB_CONTROL" not in os.environ:
        pytest.fail("these tests need the stub CUDA libraries: make test-cuda-stub", pytrace=False)
    found = Stub.of_this_process()
    gc.collect()
    found.heal()
    found.reset()
    yield found
    found.heal()
    assert found.wrong == []


@pytest.fixture
def plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches go on: what a step gives them is made up."""
    monkeypatch.setattr(GpuBackend, "collect", GpuBackend.collect)
    make_plausible()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without records of errors, whose tracebacks would keep engines alive."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def on_gpu() -> Choice:
    return choose("cuda", look())


def backend_of(folder: Path, device: int = 0) -> tuple[GpuBackend, Manifest]:
    manifest, choice = read_manifest(folder), on_gpu()
    backend = make_backend(folder, manifest, 1, choice, choice.devices[device], {}).backend
    assert isinstance(backend, GpuBackend)
    return backend, manifest
