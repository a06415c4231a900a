"""Which errors of ONNX Runtime's are about too little memory. TensorRT's stand in test_cuda.py."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from beamline.serving.backends.memory_messages import is_about_memory


def test_what_an_arena_with_a_limit_says() -> None:
    """`gpu_mem_limit` is one: the same arena, here of the CPU's provider."""
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    graph = helper.make_graph(
        [node],
        "expand",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    ort.create_and_register_allocator(
        ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT),
        ort.OrtArenaCfg({"max_mem": 2**20}),
    )
    options = ort.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    with pytest.raises(Exception, match="requested bytes") as refused:
        session.run(None, {"x": np.ones(1, np.float32), "shape": np.array([2**24])})
    assert is_about_memory(str(refused.value))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("BFCArena::Extend Failed to find a free memory block despite calling Extend. rounded_bytes=256", True),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0", True),
        ("Failed to allocate memory for requested buffer of size 1024", True),
        ("CUDA failure 2: out of memory ; GPU=0", True),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", False),
        ("Non-zero status code returned while running MatMul node", False),
    ],
)
def test_other_messages(said: str, expected: bool) -> None:
    assert is_about_memory(said) == expected
