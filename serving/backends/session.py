"""Opening a graph with ONNX Runtime on the CPU: threads, memory, and what is made of it at load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort

from beamline.serving.errors import ModelError

# What the runtime would make of a sum and the norm behind it takes three times as long as the two.
_SLOWER = ("SkipLayerNormFusion",)

Pass = Callable[[onnx.ModelProto], onnx.ModelProto]  # may change the graph; its weights stay outside


def open_session(
    path: Path, threads: int, passes: Sequence[Pass] = (), model: onnx.ModelProto | None = None
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
    # What stays behind a DequantizeLinear must not become a product of the runtime's own, slower choice.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        graph: str | bytes = str(path)
        if passes and model is None:
            model = onnx.load(path, load_external_data=False)
        if model is not None:
            for change in passes:
                model = change(model)
            folder = _where_weights_are(model, path.parent)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
            graph = model.SerializeToString()
        return ort.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(_SLOWER)
        )
    except Exception as error:
        raise ModelError(f"{path} can't be loaded by ONNX Runtime: {error}") from error


def _where_weights_are(model: onnx.ModelProto, folder: Path) -> Path:
    """The folder, links followed: to a graph that is given as bytes, the runtime reads no weights from elsewhere."""
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"]
    for entry in entries:
        file = (folder / entry.value).resolve()
        entry.value = file.name
    return file.parent if entries else folder
