"""CTranslate2: FOLDER THREADS COMPUTE_TYPE. Runs in its own environment. A vmap.txt in the folder is used."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2

from tests.benchmarks.peers.protocol import Question, serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads, compute_type = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    vmap = (Path(folder) / "vmap.txt").is_file()
    translator = ctranslate2.Translator(
        folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )

    def answer(question: Question) -> dict[str, Any]:
        source = [[f"t{token}" for token in sentence] for sentence in question.source]
        began = time.perf_counter()
        found = translator.translate_batch(
            source,
            beam_size=question.beam,
            max_decoding_length=question.target_length,
            return_scores=False,
            use_vmap=vmap,
        )
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": [[int(word[1:]) for word in result.hypotheses[0]] for result in found],
        }

    serve(answers, {"version": f"ctranslate2 {ctranslate2.__version__}"}, answer)


if __name__ == "__main__":
    main()
