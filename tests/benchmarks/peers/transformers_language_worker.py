"""Hugging Face `generate` with a language model: FOLDER THREADS. Runs in its own environment."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.benchmarks.peers.protocol import Question, serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()

    def answer(question: Question) -> dict[str, Any]:
        first: list[float] = []
        began = time.perf_counter()

        def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not first:  # the prompts have been read, and the first tokens are about to be chosen
                first.append(time.perf_counter() - began)
            return scores

        longest = max(map(len, question.source))
        # Shorter prompts stand at the right, as batches want it here.
        source = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in question.source])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in question.source])
        with torch.inference_mode():
            found = model.generate(
                source,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=question.target_length,
                max_new_tokens=question.target_length,
                logits_processor=[note],
                pad_token_id=0,
            )
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": found[:, longest:].tolist(), "first_seconds": first[0]}

    versions = f"float32, transformers {transformers.__version__}, torch {torch.__version__}"
    serve(answers, {"version": versions}, answer)


if __name__ == "__main__":
    main()
