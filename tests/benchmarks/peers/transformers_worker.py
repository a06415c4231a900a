"""Hugging Face `generate`: FOLDER THREADS. Runs in its own environment."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import MarianMTModel
from transformers.utils import logging

from tests.benchmarks.peers.protocol import Question, serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = MarianMTModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()

    def answer(question: Question) -> dict[str, Any]:
        began = time.perf_counter()
        source = torch.tensor(question.source)
        with torch.inference_mode():
            found = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=question.beam,
                do_sample=False,
                max_length=question.target_length + 1,
            )
        tokens = found[:, 1:].tolist()  # without the start token
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    serve(answers, {"version": versions}, answer)


if __name__ == "__main__":
    main()
