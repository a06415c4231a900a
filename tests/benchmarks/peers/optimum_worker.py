"""Optimum's ONNX Runtime models behind Hugging Face `generate`: FOLDER THREADS. Runs in its own environment."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM

from tests.benchmarks.peers.hugging_face import answering
from tests.benchmarks.peers.protocol import serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # As ours: threads that spin behind a run would take the cores of whoever is measured next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    torch.set_num_threads(threads)
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, session_options=options, local_files_only=True)

    versions = f"optimum-onnx {version('optimum-onnx')}, onnxruntime {onnxruntime.__version__}"
    serve(answers, {"version": versions}, answering(model))


if __name__ == "__main__":
    main()
