"""llama.cpp through llama-cpp-python, its own batching of sequences: FILE THREADS. Runs in its own environment."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests.benchmarks.peers.protocol import Question, serve, take_stdout

CONTEXT, BATCH, SEQUENCES = 8192, 2048, 16
_ERROR = 4  # ggml's level of it


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, data: object) -> None:
    """Hundreds of lines about every context, otherwise."""
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    answers = take_stdout()
    file, threads = sys.argv[1], int(sys.argv[2])
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = CONTEXT, BATCH, 512, SEQUENCES
    settings.n_threads = settings.n_threads_batch = threads
    settings.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    words = llama_cpp.llama_vocab_n_tokens(vocabulary)
    end = llama_cpp.llama_vocab_eos(vocabulary)
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def put(token: int, position: int, sequence: int, wanted: bool) -> int:
        place = int(batch.n_tokens)
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
        batch.seq_id[place][0], batch.logits[place] = sequence, wanted
        batch.n_tokens = place + 1
        return place

    def run() -> None:
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def best(place: int) -> int:
        logits = np.ctypeslib.as_array(
            ctypes.cast(llama_cpp.llama_get_logits_ith(context, place), ctypes.POINTER(ctypes.c_float)), (words,)
        )
        logits[end] = -np.inf  # exactly so many tokens
        return int(logits.argmax())

    def answer(question: Question) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        began = time.perf_counter()
        tokens: list[list[int]] = []
        first = []
        batch.n_tokens = 0
        waiting: list[int] = []

        def flush() -> None:
            run()
            tokens.extend([best(place)] for place in waiting)
            first.extend([time.perf_counter() - began] * len(waiting))
            waiting.clear()
            batch.n_tokens = 0

        for sequence, prompt in enumerate(question.source):
            if batch.n_tokens + len(prompt) > BATCH:
                flush()
            for position, token in enumerate(prompt):
                place = put(token, position, sequence, position == len(prompt) - 1)
            waiting.append(place)
        flush()
        for number in range(question.target_length - 1):
            places = [
                put(tokens[sequence][-1], len(prompt) + number, sequence, True)
                for sequence, prompt in enumerate(question.source)
            ]
            run()
            for sequence, place in enumerate(places):
                tokens[sequence].append(best(place))
            batch.n_tokens = 0
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": tokens, "first_seconds": sum(first) / len(first)}

    kind = Path(file).stem.rpartition(".")[2]
    serve(answers, {"version": f"{kind}, llama-cpp-python {llama_cpp.__version__}"}, answer)


if __name__ == "__main__":
    main()
