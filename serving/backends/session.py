"""Opening a graph with ONNX Runtime on the CPU: threads, memory, and what is made of it at load."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort

from serving.backends.dialect import in_dialect
from serving.errors import ModelError


def open_session(
    path: Path, threads: int, few_bits: bool = False, model: onnx.ModelProto | None = None
) -> ort.InferenceSession:
    """`model`: what was made of the graph that stands there; its weights still do."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 2
    # Shapes change from step to step: a plan of memory per shape would only grow.
    options.enable_mem_pattern = False
    # Encoder and step have threads of their own; those of one that still spin take the core from the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        graph: str | bytes = str(path)
        if few_bits:
            # What stays behind a DequantizeLinear must not become a product of the runtime's own, slower choice.
            options.add_session_config_entry("session.disable_quant_qdq", "1")
            model = in_dialect(onnx.load(path, load_external_data=False) if model is None else model)
        if model is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
            graph = model.SerializeToString()
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"{path} can't be loaded by ONNX Runtime: {error}") from error
