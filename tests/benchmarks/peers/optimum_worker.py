"""Optimum's ONNX Runtime models behind Hugging Face `generate`: FOLDER THREADS. Runs in its own environment."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM

from tests.benchmarks.peers.protocol import Question, serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # As everybody here: threads that spin between two runs would take the cores of whoever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    torch.set_num_threads(threads)
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, session_options=options, local_files_only=True)

    def answer(question: Question) -> dict[str, Any]:
        began = time.perf_counter()
        source = torch.tensor(question.source)
        found = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            num_beams=question.beam,
            do_sample=False,
            max_length=question.target_length + 1,
        )
        tokens = found[:, 1:].tolist()  # without the start token
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    versions = f"optimum-onnx {version('optimum-onnx')}, onnxruntime {onnxruntime.__version__}"
    serve(answers, {"version": versions}, answer)


if __name__ == "__main__":
    main()
