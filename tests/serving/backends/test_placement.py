"""What of a graph the CUDA provider may leave to the CPU, and what is loaded before it. No CUDA is needed for that."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from beamline.serving.backends import onnxruntime_cuda
from beamline.serving.backends.fake import fake_manifest
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner, open_session, preload
from beamline.serving.backends.placement import CPU, CUDA, RECORD, Placed, describe, misplaced, placement
from beamline.serving.errors import ModelError


@pytest.fixture(autouse=True)
def not_loaded_yet() -> Iterator[None]:
    preload.cache_clear()
    yield
    preload.cache_clear()


def model_of(*nodes: onnx.NodeProto, constants: dict[str, list[int]] | None = None) -> onnx.ModelProto:
    """`x` [B, 4] in, `y` out."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [
        helper.make_tensor(name, TensorProto.INT64, [len(values)], values) for name, values in (constants or {}).items()
    ]
    graph = helper.make_graph(list(nodes), "graph", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


def wrong(model: onnx.ModelProto, on_cpu: str, gone: str = "") -> list[str]:
    """Everything else is on the GPU."""
    on_cpu_names, gone_names = on_cpu.split(), gone.split()
    placed = [
        Placed(each.name, each.op_type, each.name in on_cpu_names)
        for each in model.graph.node
        if each.name not in gone_names
    ]
    return [each.name for each in misplaced(model.graph, placed)]


SIZES = (
    node("Shape", "x", "shape"),
    node("Gather", "shape zero", "rows"),
    node("Mul", "rows two", "twice"),
    node("Concat", "twice two", "joined", axis=0),
    node("Cast", "twice", "as_float", to=TensorProto.FLOAT),
)
CONSTANTS = {"zero": [0], "two": [2], "minus_one": [-1]}


def test_arithmetic_on_sizes_may_be_on_the_cpu() -> None:
    """Whatever its type: a size becomes a float where it divides one."""
    model = model_of(
        *SIZES, node("Reshape", "x joined", "wide"), node("Div", "wide as_float", "y"), constants=CONSTANTS
    )
    assert wrong(model, "rows twice joined as_float") == []
    assert wrong(model, "rows twice joined as_float", gone="shape") == []  # merged with another of the same
    assert wrong(model, "joined as_float", gone="rows twice") == []


@pytest.mark.parametrize(
    ("reader", "on_cpu"),
    [
        (node("Mul", "x as_float", "y"), "y"),  # an input of the graph
        (node("Elu", "doubled", "y"), "y"),  # what the GPU has computed
        (node("Cast", "doubled", "y", to=TensorProto.FLOAT16), "y"),
        (node("Reshape", "doubled joined", "y"), "y"),
        (node("Expand", "as_float joined", "y"), "y"),  # of sizes, but as large as a tensor
        (node("ConstantOfShape", "joined", "y"), "y"),
        (node("Slice", "table rows twice", "y"), "y"),  # of a large constant
    ],
    ids=lambda each: each.op_type if isinstance(each, onnx.NodeProto) else "",
)
def test_a_part_of_the_model_may_not(reader: onnx.NodeProto, on_cpu: str) -> None:
    constants = {**CONSTANTS, "table": list(range(1000))}
    model = model_of(*SIZES, node("Add", "x x", "doubled"), reader, constants=constants)
    assert wrong(model, f"rows twice joined as_float {on_cpu}") == ["y"]


def test_what_the_gpu_computed_of_sizes_is_not_a_size() -> None:
    """It would have to be fetched."""
    model = model_of(*SIZES, node("Cast", "joined", "y", to=TensorProto.FLOAT), constants=CONSTANTS)
    assert wrong(model, "rows twice joined y") == []
    assert wrong(model, "y") == ["y"]


def test_a_shape_on_the_cpu_is_given_the_whole_tensor() -> None:
    model = model_of(node("Add", "x x", "doubled"), node("Shape", "doubled", "shape"), node("Identity", "x", "y"))
    assert wrong(model, "shape") == ["shape"]
    assert wrong(model, "") == []


def test_everything_behind_a_wrong_one_is_named() -> None:
    model = model_of(node("Elu", "x", "a"), node("Elu", "a", "b"), node("Neg", "b", "y"))
    found = misplaced(model.graph, [Placed(each.name, each.op_type, True) for each in model.graph.node])
    assert describe(found) == "2 x Elu (a), 1 x Neg (y)"


def test_inside_a_branch() -> None:
    body = helper.make_graph(
        [node("Add", "rows two", "more"), node("Elu", "x", "inner")],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    choice = helper.make_node("If", ["condition"], ["y"], name="y", then_branch=body, else_branch=body)
    model = model_of(*SIZES, node("Less", "rows two", "condition"), choice, constants=CONSTANTS)
    placed = [Placed(name, kind, True) for name, kind in (("more", "Add"), ("inner", "Elu"))]
    placed += [Placed("rows", "Gather", True), Placed("condition", "Less", True), Placed("y", "If", False)]
    assert {each.name for each in misplaced(model.graph, placed)} == {"inner"}


def test_what_the_runtime_wrote_itself() -> None:
    """It moves sizes about; an operator of its own, or arithmetic of unknown origin, is a part of the model."""
    graph = model_of(node("Identity", "x", "y")).graph
    assert misplaced(graph, [Placed("new", "Gather", True), Placed("", "Squeeze", True)]) == []
    for other in (Placed("", "Less", True), Placed("fused", "Gather", True, "com.microsoft")):
        assert misplaced(graph, [other]) == [other]


def test_a_constant_node_is_a_constant() -> None:
    value = numpy_helper.from_array(numpy_helper.to_array(helper.make_tensor("", TensorProto.INT64, [1], [3])))
    constant = helper.make_node("Constant", [], ["three"], name="three", value=value)
    model = model_of(constant, *SIZES, node("Add", "rows three", "y"), constants=CONSTANTS)
    assert wrong(model, "rows y", gone="three") == []


def test_the_placement_is_asked_of_the_session(tmp_path: Path) -> None:
    """Of the real one, by the names that we rely on."""
    path = tmp_path / "graph.onnx"
    onnx.save(model_of(node("Elu", "x", "y")), path)
    options = ort.SessionOptions()
    options.add_session_config_entry(RECORD, "1")
    session = ort.InferenceSession(str(path), options, providers=[CPU])
    assert placement(session) == [Placed("y", "Elu", True)]


class FakeSession:
    """As if there were CUDA, for all but what is in `on_cpu`."""

    on_cpu: tuple[str, ...] = ()

    def __init__(self, graph: bytes, options: ort.SessionOptions, providers: list[Any], **others: Any) -> None:
        assert options.get_session_config_entry(RECORD) == "1"
        assert not others["enable_fallback"]
        self._nodes = onnx.load_model_from_string(graph).graph.node

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def part(name: str, nodes: list[onnx.NodeProto]) -> Any:
            return SimpleNamespace(ep_name=name, get_nodes=lambda: nodes)

        return [
            part(CUDA, [each for each in self._nodes if each.name not in self.on_cpu]),
            part(CPU, [each for each in self._nodes if each.name in self.on_cpu]),
        ]


def test_a_graph_with_a_part_on_the_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.onnx"
    onnx.save(model_of(*SIZES, node("Elu", "x", "y"), constants=CONSTANTS), path)
    monkeypatch.setattr(ort, "InferenceSession", FakeSession)
    monkeypatch.setattr(FakeSession, "on_cpu", ("rows", "twice"))
    open_session(path, [CUDA], "cuda")
    monkeypatch.setattr(FakeSession, "on_cpu", ("rows", "y"))
    with pytest.raises(
        ModelError, match=r"step\.onnx: .* would leave 1 x Elu \(y\) to the CPU, where only arithmetic on"
    ):
        open_session(path, [CUDA], "cuda")


def test_the_libraries_of_cuda_are_loaded_once_and_only_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, calls = tmp_path / "graph.onnx", []

    def loud(*arguments: Any) -> None:
        calls.append(arguments)
        print("Failed to load libcublas")

    onnx.save(model_of(node("Elu", "x", "y")), path)
    monkeypatch.setattr(ort, "preload_dlls", loud)
    open_session(path, [CPU], "cpu")
    assert calls == []
    monkeypatch.setattr(ort, "InferenceSession", FakeSession)
    for _ in range(2):
        open_session(path, [CUDA], "cuda")
    assert calls == [()]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(FakeSession, "get_providers", lambda self: [CPU])
    with pytest.raises(ModelError, match=r"left CUDA out .* ONNX Runtime says: Failed to load libcublas"):
        open_session(path, [CUDA], "cuda")
    assert len(calls) == 1


def test_what_nvrtc_would_not_find_is_loaded_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs it: beside it, where it does not look."""
    loaded: list[str] = []
    folder = tmp_path / "nvidia_cuda_nvrtc-13.0.88.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: nvidia-cuda-nvrtc\nVersion: 13.0.88\n")
    libraries = [f"nvidia/cu13/lib/libnvrtc{name}.so.13" for name in ("", "-builtins.alt", "-builtins")]
    (folder / "RECORD").write_text("".join(f"{library},,\n" for library in libraries))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, **_: loaded.append(path))
    monkeypatch.setattr(ort, "preload_dlls", lambda: loaded.append("the others"))
    preload()
    assert loaded == [str(tmp_path / libraries[-1]), "the others"]


def test_loading_them_is_harmless_where_there_are_none(capfd: pytest.CaptureFixture[str]) -> None:
    onnxruntime_cuda.preload()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("precision", "left_out"),
    [("float32", []), ("int8", []), *((half, ["MatmulTransposeFusion"]) for half in ("float16", "bfloat16"))],
)
def test_optimisations_that_are_left_out(
    precision: str, left_out: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One always, which makes splits of slices; another one breaks half precision."""
    manifest = fake_manifest().model_copy(update={"precision": precision})
    for _, file in manifest.graphs:
        if file is not None:
            onnx.save(model_of(node("Elu", "x", "y")), tmp_path / file.file)
    asked: list[list[str]] = []

    class Session(FakeSession):
        def __init__(self, *arguments: Any, disabled_optimizers: list[str], **others: Any) -> None:
            super().__init__(*arguments, **others)
            asked.append(disabled_optimizers)

    monkeypatch.setattr(ort, "InferenceSession", Session)
    OnnxRuntimeCudaRunner(tmp_path, manifest, device=0, stream=0)
    assert asked
    assert all(each == ["GatherSliceToSplitFusion", *left_out] for each in asked)
