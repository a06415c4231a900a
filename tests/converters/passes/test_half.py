"""Half precision by types: what is in half, what stays in float32, and that the model is still the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from beamline.converters.certificate.precision import PrecisionCheck, compare
from beamline.converters.passes.half import HALF_TYPES, rounded, simulated, to_half
from beamline.converters.passes.lowering import lower
from beamline.serving.contract.manifest import Manifest, StateKind
from beamline.serving.errors import ParityFailure
from tests.support.compiled import compile_version
from tests.support.marian_shape import MarianShape
from tests.support.seq2seq import T5, convert_seq2seq

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
    assert isinstance(check, PrecisionCheck)
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


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_simulated_graph_is_rounded(plain_model: MarianShape, precision: str) -> None:
    """Its constants have lost their last bits; every product, and what it returns for a slot, is cast down and up."""
    half = HALF_TYPES[precision]
    returned: list[tuple[ir.Model, str | None]] = []
    for _, model in graphs(plain_model.folder, plain_model.manifest):
        to_half(model, plain_model.manifest.state, precision)
        returned += [(model, value.name) for value in model.graph.outputs if value.dtype is half]
        simulated(model, precision)
        products = [node for node in model.graph if node.op_type == "MatMul"]
        assert products
        for node in products:
            (cast,) = {use.node for use in node.outputs[0].uses()}
            assert (cast.op_type, cast.outputs[0].dtype) == ("Cast", half)
            weights = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
            if weights is not None:
                assert np.array_equal(weights.numpy(), rounded(weights.numpy(), half).astype(np.float32))
    caches = plain_model.manifest.tensors(StateKind.CACHE)
    assert {name for _, name in returned} > {tensor.output for tensor in caches}  # and the encoder's memory
    for model, name in returned:
        (value,) = [value for value in model.graph.outputs if value.name == name]
        up = value.producer()
        assert up is not None
        assert up.op_type == "Cast"
        assert up.inputs[0] is not None
        assert (up.inputs[0].dtype, value.dtype) == (half, ir.DataType.FLOAT)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize(
    ("values", "addend", "precision", "expected"),
    [
        ([60000, 60000, -60000, -58976], 0, "float16", 1024),  # the sum inside a product is not in half
        ([20000, 20000, 20000, 20000], 0, "float16", np.inf),
        ([20000, 20000, 20000, 20000], -30000, "float16", np.inf),  # although the end would fit
        ([60000, 0, 0, 0], 60000, "float16", np.inf),
        ([2048, 1, 0, 0], -2048, "float16", 0),  # 2049 is not in float16
        ([20000, 20000, 20000, 20000], 0, "bfloat16", 79872),
        ([256, 1, 0, 0], -256, "bfloat16", 0),
    ],
)
def test_what_overflows_between_operators_is_infinite(
    values: list[float], addend: float, precision: str, expected: float, level: str
) -> None:
    """A product, an addition, and a cast of it to float32; ONNX Runtime optimises no rounding away."""
    arrays = {"weights": np.ones((4, 1), np.float32), "addend": np.full(1, addend, np.float32)}
    known = {
        name: ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
        for name, tensor in ((name, ir.Tensor(array, name=name)) for name, array in arrays.items())
    }
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 4]))
    product = ir.node("MatMul", [x, known["weights"]])
    total = ir.node("Add", [product.outputs[0], known["addend"]])
    for node, name in ((product, "product"), (total, "total")):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape([1, 1])
    graph = ir.Graph(
        [x],
        [total.outputs[0]],
        nodes=[product, total],
        initializers=list(known.values()),
        opset_imports={"": 24},
        name="graph",
    )
    model = ir.Model(graph, ir_version=11)
    to_half(model, (), precision)
    assert product.outputs[0].dtype is total.outputs[0].dtype is HALF_TYPES[precision]
    simulated(model, precision)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(["total"], {"x": np.array([values], np.float32)})
    assert found.tolist() == [[expected]]


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


def test_a_model_that_overflows_is_refused(tmp_path: Path) -> None:
    """A T5 whose feed-forward layers have inner numbers of any size: in float32 it is the same to the bit. What stood
    there before is not touched."""
    small = convert_seq2seq(T5.calm(), tmp_path / "small")
    accepted = Path(shutil.copytree(small.folder, tmp_path / "accepted"))
    _, check = lower(accepted, small.manifest, "float16")
    assert check.problems() == []
    loud = Path(shutil.copytree(small.folder, tmp_path / "loud"))
    inner = (small.original.config.d_model, small.original.config.d_ff)
    for name, model in graphs(loud, small.manifest):
        scales: dict[tuple[int, ...], float] = {inner: 2.0**14, inner[::-1]: 2.0**-14}  # between them is only a ReLU
        for value in model.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            scale = scales.get(tuple(tensor.shape.numpy()))
            if scale is not None:
                value.const_value = ir.Tensor(tensor.numpy() * np.float32(scale), name=value.name)
        ir.save(model, loud / f"{name}.onnx")
    assert compare(small.folder, small.manifest, loud, small.manifest, "float16").max_log_prob_difference == 0
    loud_as_well = Path(shutil.copytree(loud, tmp_path / "loud as well"))
    before = (loud / "step.onnx").read_bytes()
    with pytest.raises(ParityFailure, match=r"numbers overflow(.|\n)*end at 65504\. Try --precision bfloat16"):
        lower(loud, small.manifest, "float16")
    assert (loud / "step.onnx").read_bytes() == before
    _, check = lower(loud_as_well, small.manifest, "bfloat16")
    assert check.problems() == []
