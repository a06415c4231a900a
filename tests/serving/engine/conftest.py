"""The tests of the engine over real graphs run on every backend: on the CPU always, on emulated GPUs in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import KINDS, served_by
from tests.support.harness import Harness
from tests.support.tiny_lm import TinyModel

_OVER_GRAPHS = ("test_engine", "test_search_exact", "test_generation", "test_chunked_prefill")
assert all((Path(__file__).parent / f"{name}.py").exists() for name in _OVER_GRAPHS)  # or one would run on the CPU only


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in _OVER_GRAPHS:
        only_one = metafunc.definition.get_closest_marker("one_backend") is not None
        marks = {kind: [] if kind == KINDS[0] else [pytest.mark.full] for kind in KINDS}
        kinds = [pytest.param(kind, marks=marks[kind], id=kind) for kind in KINDS[: 1 if only_one else None]]
        metafunc.parametrize("backend_kind", kinds, indirect=True)


@pytest.fixture
def harness(tiny_lm: TinyModel) -> Harness:
    return Harness(tiny_lm)


@pytest.fixture(autouse=True)
def backend_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    with served_by(getattr(request, "param", KINDS[0])):
        yield
