"""Half precision by types: what is in half, what stays in float32, and that the model is still the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from beamline.converters import lowering_check
from beamline.converters.lowering import lower
from beamline.converters.passes.half import rounded, simulated, to_half
from beamline.serving.contract.manifest import Manifest, StateKind
from beamline.serving.errors import ParityFailure
from tests.support.compiled import compile_version
from tests.support.marian_shape import MarianShape

SMALL_IN_FLOAT32 = {"LayerNormalization", "Softmax", "LogSoftmax", "TopK", "ReduceSum", "CumSum"}
LARGE_IN_HALF = {"MatMul", "Attention", "TensorScatter"}


@pytest.fixture(params=["float16", "bfloat16"])
def lowered(request: pytest.FixtureRequest, plain_model: MarianShape, tmp_path: Path) -> tuple[Path, Manifest, object]:
    folder = tmp_path / "half"
    shutil.copytree(plain_model.folder, folder)
    manifest, check = lower(folder, plain_model.manifest, request.param)
    return folder, manifest, check


def graphs(folder: Path, manifest: Manifest) -> Iterator[tuple[str, ir.Model]]:
    for name, file in manifest.graphs:
        if file is not None:
            yield name, ir.load(folder / file.file)


def test_a_lowered_version(lowered: tuple[Path, Manifest, object], plain_model: MarianShape) -> None:
    """One test for all of it: lowering takes seconds."""
    folder, manifest, check = lowered
    half = manifest.precision
    assert isinstance(check, lowering_check.PrecisionCheck)
    assert check.problems() == []
    assert 0 < check.mean_log_prob_difference < (0.005 if half == "float16" else 0.1)
    # Half the weights, and nothing left over.
    assert manifest.weights.bytes < 0.7 * plain_model.manifest.weights.bytes
    assert {path.name for path in folder.iterdir()} == {path.name for path in plain_model.folder.iterdir()}
    assert {tensor.dtype for tensor in manifest.state if tensor.kind is StateKind.CACHE} == {half}
    kind = ir.DataType.FLOAT16 if half == "float16" else ir.DataType.BFLOAT16
    for name, model in graphs(folder, manifest):
        types = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
        expected = {tensor.name: kind for tensor in manifest.state if tensor.dtype == half}
        expected |= {tensor.output: kind for tensor in manifest.state if tensor.dtype == half}
        for tensor, dtype in types.items():
            assert dtype is expected.get(str(tensor), dtype), (name, tensor)
            assert tensor in expected or dtype is not kind, (name, tensor)
        for node in model.graph:
            if node.op_type in LARGE_IN_HALF:
                assert node.outputs[0].dtype is kind, (name, node.name)
            elif node.op_type in SMALL_IN_FLOAT32 and node.outputs[0].dtype is not ir.DataType.INT64:
                assert node.outputs[0].dtype is ir.DataType.FLOAT, (name, node.name)
            floats = {
                each.dtype for each in node.inputs if each is not None and each.dtype in (kind, ir.DataType.FLOAT)
            }
            assert len(floats) <= 1, f"{node.name} mixes types"  # TensorRT would refuse it
    compile_version(folder, manifest)


def test_simulated_bfloat16_is_rounded(plain_model: MarianShape) -> None:
    """Its constants have lost their last bits, and every product is cast down and up again."""
    model = ir.load(plain_model.folder / "step.onnx")
    to_half(model, plain_model.manifest.state, "bfloat16")
    simulated(model)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert products
    for node in products:
        (cast,) = {use.node for use in node.outputs[0].uses()}
        assert (cast.op_type, cast.outputs[0].dtype) == ("Cast", ir.DataType.BFLOAT16)
        weights = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        if weights is not None:
            assert not np.any(weights.numpy().view(np.uint32) & 0xFFFF)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op_type", "more", "constants", "attributes"),
    [
        *((kind, (), ("limit",), {}) for kind in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")),
        ("Clip", (), ("limit", "limit"), {}),
        ("Floor", (), (), {}),
        ("LeakyRelu", (), (), {"alpha": 0.1}),
        ("Pad", ("pads",), (), {}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_has_no_kernel_in_bfloat16_is_in_float32(
    op_type: str, more: tuple[str, ...], constants: tuple[str, ...], attributes: dict[str, float], precision: str
) -> None:
    """ONNX Runtime's CUDA provider has none for these, and would not load the graph; in float16 it has."""
    half = ir.DataType.FLOAT16 if precision == "float16" else ir.DataType.BFLOAT16
    bool_out = op_type not in ("Clip", "Floor", "LeakyRelu", "Pad")
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "y"))
    values: dict[str, np.ndarray] = {
        "weights": np.ones((4, 4), np.float32),
        "limit": np.array(1.001, np.float32),
        "pads": np.array([0, 0, 0, 1], np.int64),
    }
    known = {
        name: ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
        for name, tensor in ((name, ir.Tensor(array, name=name)) for name, array in values.items())
    }
    product = ir.node("MatMul", [x, known["weights"]])
    product.outputs[0].name, product.outputs[0].type = "product", ir.TensorType(ir.DataType.FLOAT)
    reader = ir.node(
        op_type, [product.outputs[0], *(known[name] for name in (*more, *constants))], attributes, outputs=[y]
    )
    y.type = ir.TensorType(ir.DataType.BOOL if bool_out else ir.DataType.FLOAT)
    graph = ir.Graph([x], [y], nodes=[product, reader], initializers=list(known.values()), opset_imports={"": 24})
    to_half(ir.Model(graph, ir_version=11), (), precision)
    assert product.outputs[0].dtype is half
    expected = half if precision == "float16" else ir.DataType.FLOAT
    floats = [value.dtype for value in reader.inputs if value is not None and value.dtype is not ir.DataType.INT64]
    assert floats == [expected] * (1 + len(constants))
    assert bool_out or reader.outputs[0].dtype is expected
    if precision == "bfloat16" and constants:
        limit = ir.convenience.get_const_tensor(reader.inputs[-1]) if reader.inputs[-1] is not None else None
        assert limit is not None
        assert limit.numpy() == np.float32(1.001)  # not rounded for nothing


def test_a_large_constant_stays_finite() -> None:
    values = np.array([-1e9, -np.inf, 1.5], np.float32)
    assert rounded(values, ir.DataType.FLOAT16).tolist() == [-65504.0, -np.inf, 1.5]


def test_a_model_that_half_precision_breaks_is_refused(
    plain_model: MarianShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its feed-forward layers overflow; what stood there before is not touched."""
    folder = tmp_path / "loud"
    shutil.copytree(plain_model.folder, folder)
    for name, model in graphs(folder, plain_model.manifest):
        for node in list(model.graph):
            if node.op_type == "MatMul" and node.inputs[1] is not None and node.inputs[1].const_value is not None:
                value = node.inputs[1]
                assert value.const_value is not None
                value.const_value = ir.Tensor(value.const_value.numpy() * 3e4, name=value.name)
        ir.save(model, folder / f"{name}.onnx")
    before = (folder / "step.onnx").read_bytes()
    with pytest.raises(ParityFailure, match="bfloat16"):
        lower(folder, plain_model.manifest, "float16")
    assert (folder / "step.onnx").read_bytes() == before
