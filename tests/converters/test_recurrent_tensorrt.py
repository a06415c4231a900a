"""Recurrent graphs compile with TensorRT, for a GPU that need not be there. Only where `tensorrt-rtx` is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from converters.recognise import converter_for
from tests.support.recurrent import Shape, lively_recurrent, text_vocabulary, write_recurrent

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
# The smallest, usual and largest of each axis.
SIZES = {"B": (1, 4, 8), "K": (1, 4, 4), "C": (16, 64, 64), "S": (1, 16, 64), "T": (1, 8, 32), "E": (0, 0, 4)}
SHAPES = (
    Shape("gru", "additive", "concat", 1, "tanh", "previous", "tied"),
    Shape("coupled-peepholes", "predictive", "concat", 2, "tanh", "fed", "bare"),
    Shape("lstm", "none", "reversed", 2, "copy"),
)


def compiled(trt: Any, path: Path) -> tuple[set[str], list[str]]:
    """The kinds of layers, and what was said of inputs that have no effect."""
    said: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: object, message: str) -> None:
            said.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(path)), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    inputs = onnx.load(path, load_external_data=False).graph.input
    profile = builder.create_optimization_profile()
    for value in inputs:
        axes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        profile.set_shape(
            value.name, *(tuple(SIZES[a][k] if isinstance(a, str) else a for a in axes) for k in range(3))
        )
    config = builder.create_builder_config()
    assert config.add_optimization_profile(profile) >= 0
    assert builder.build_serialized_network(network, config) is not None, said[-5:]
    kinds = {network.get_layer(number).type.name for number in range(network.num_layers)}
    return kinds, [message for message in said if "unused input" in message.lower()]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_recurrent_graphs_compile(tmp_path: Path, shape: Shape) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    source = write_recurrent(tmp_path / "source", lively_recurrent(shape.config(text_vocabulary())))
    converter_for(source).convert("recurrent", tmp_path)
    for name in ("encoder", "step", "score"):
        kinds, unused = compiled(trt, tmp_path / "recurrent" / "1" / f"{name}.onnx")
        assert unused == []
        assert ("RECURRENCE" in kinds) == (name != "step")
        assert ("TOPK" in kinds) == (name == "step")
