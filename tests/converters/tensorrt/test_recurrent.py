"""Recurrent graphs compile with TensorRT, for GPUs that need not be there. A sample of it in
`families/test_recurrent_served.py` shares that file's exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamline.converters.families import converter_for
from beamline.converters.tensorrt.targets import CAPABILITIES
from tests.support.compiled import compile_version
from tests.support.recurrent import Shape, lively_recurrent, text_vocabulary, write_recurrent

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
SHAPES = (
    Shape("gru", "additive", "concat", 1, "tanh", "previous", "tied"),
    Shape("coupled-peepholes", "predictive", "concat", 2, "tanh", "fed", "bare"),
    Shape("lstm", "none", "reversed", 2, "copy"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_recurrent_graphs_compile_everywhere(tmp_path: Path, shape: Shape) -> None:
    source = write_recurrent(tmp_path / "source", lively_recurrent(shape.config(text_vocabulary())))
    converter_for(source).convert("recurrent", tmp_path)
    found = compile_version(tmp_path / "recurrent" / "1", capabilities=CAPABILITIES, all_buckets=True, slots=32)
    for name, plans in found.items():
        for plan in plans:
            assert ("RECURRENCE" in plan.layers) == (name != "step")
            assert ("TOPK" in plan.layers) == (name == "step")
