"""Hugging Face `generate`: FOLDER THREADS. Runs in its own environment."""

from __future__ import annotations

import sys

import torch
import transformers
from transformers import MarianMTModel
from transformers.utils import logging

from tests.benchmarks.peers.hugging_face import answering
from tests.benchmarks.peers.protocol import serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = MarianMTModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    serve(answers, {"version": versions}, answering(model))


if __name__ == "__main__":
    main()
