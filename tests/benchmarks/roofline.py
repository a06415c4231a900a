"""How near a step is to what the machine can do: its products at their measured peak, its weights at the bandwidth.

Both are measured with ONNX Runtime, on as many threads, in the same minutes. A step can't be faster than the
slower of the two; what is left is everything else: attention, norms, rounding, the search, and threads that wait.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from beamline.serving.contract.manifest import read_manifest
from tests.benchmarks.measure import Measured
from tests.benchmarks.table import print_table

_WIDTH, _ROWS = 2048, 256  # of the product that shows the peak
_PASSED = ("Cast", "Transpose", "DequantizeLinear")  # between a stored matrix and its product
_BYTES = 256 << 20  # more than any cache holds


@dataclass(frozen=True)
class Machine:
    """Multiplications with an addition, and bytes, a second."""

    products: dict[str, float]  # by precision
    bandwidth: float


def measure_machine(threads: int) -> Machine:
    return Machine({precision: _peak(precision, threads) for precision in ("float32", "int8")}, _bandwidth(threads))


def _peak(precision: str, threads: int) -> float:
    """Of one large product, with weights that are packed at load as a model's are."""
    chance = np.random.default_rng(0)
    if precision == "float32":
        weights = chance.standard_normal((_WIDTH, _WIDTH)).astype(np.float32)
        x = chance.standard_normal((_ROWS, _WIDTH)).astype(np.float32)
        seconds = _seconds("MatMul", x, weights, TensorProto.FLOAT, threads)
    else:
        levels = chance.integers(-60, 60, (_WIDTH, _WIDTH)).astype(np.int8)
        rows = chance.integers(0, 255, (_ROWS, _WIDTH)).astype(np.uint8)
        seconds = _seconds("MatMulInteger", rows, levels, TensorProto.INT32, threads)
    return _ROWS * _WIDTH * _WIDTH / seconds


def _bandwidth(threads: int) -> float:
    """Of reading, by the runtime's threads: the largest of many numbers."""
    x = np.ones((_BYTES // 4 // _WIDTH, _WIDTH), np.float32)
    return _BYTES / _seconds("ReduceMax", x, np.array([1]), TensorProto.FLOAT, threads)


def _seconds(operator: str, x: NDArray[Any], constant: NDArray[Any], output: int, threads: int) -> float:
    """Of an operator, its second input a constant: the fastest of some runs."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "c"], ["y"])],
        operator,
        [helper.make_tensor_value_info("x", kind, [None, x.shape[1]])],
        [helper.make_tensor_value_info("y", output, [None, None])],
        [numpy_helper.from_array(constant, "c")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = []
    for _ in range(60):  # a second or two: a host that has other guests gives all of its cores only now and then
        began = time.perf_counter()
        session.run(None, {"x": x})
        found.append(time.perf_counter() - began)
    return min(found)


def print_roofline(models: dict[str, Path], found: list[Measured], threads: int) -> None:
    """`models`: by the name of the system, the version that it served."""
    machine = measure_machine(threads)
    peaks = ", ".join(f"{precision} {peak / 1e9:.0f}" for precision, peak in machine.products.items())
    print(
        f"\nRoofline: products at {peaks} G multiply-adds/s, memory at {machine.bandwidth / 1e9:.1f} GB/s (measured)."
    )
    print("Of a step's time, what its products would take at that peak, and its weights at that bandwidth:\n")
    rows: list[tuple[str, ...]] = [("batch x beam", "system", "ms/step", "products", "memory")]
    for measured in found:
        for name, folder in models.items():
            best = measured.best(name)
            if best is None:
                continue
            step = best.details["decode_seconds"] / best.details["steps"]
            work = _work(folder, measured.case.batch, measured.case.beam)
            products = work.multiplications / machine.products[work.precision] / step
            memory = work.bytes / machine.bandwidth / step
            rows.append((str(measured.case), name, f"{1000 * step:.1f}", f"{products:.0%}", f"{memory:.0%}"))
    print_table(rows)


@dataclass(frozen=True)
class _Work:
    """Of one step."""

    precision: str
    multiplications: float
    bytes: float


def _work(folder: Path, batch: int, beam: int) -> _Work:
    manifest = read_manifest(folder)
    graph = onnx.load(folder / manifest.graphs.step.file, load_external_data=False).graph
    sizes = _matrices(graph)
    width = 1 if manifest.precision == "int8" else 4
    return _Work(
        "int8" if manifest.precision == "int8" else "float32",
        float(batch * beam * sum(sizes)),
        float(width * sum(sizes)),
    )


def _matrices(graph: onnx.GraphProto) -> list[int]:
    """How many numbers each of the matrices has that a row is multiplied by."""
    tensors = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer if len(tensor.dims) == 2}
    passed = {node.output[0]: node.input[0] for node in graph.node if node.op_type in _PASSED}

    def size(name: str) -> int:
        while name in passed:
            name = passed[name]
        return tensors.get(name, 0)

    return [size(node.input[1]) for node in graph.node if node.op_type == "MatMul" and size(node.input[1])]
