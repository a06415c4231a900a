from __future__ import annotations

from pathlib import Path

import pytest

from beamline.converters.tensorrt.graph import Graph
from tests.support.tensorrt_builder import smallest_graph


@pytest.fixture
def relu(tmp_path: Path) -> Graph:
    return smallest_graph(tmp_path)
