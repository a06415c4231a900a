"""onnxruntime-genai: FOLDER THREADS. Runs in its own environment."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai

from tests.benchmarks.peers.protocol import Question, serve, take_stdout


def main() -> None:
    answers = take_stdout()
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    _set_threads(folder / "genai_config.json", threads)
    model = genai.Model(str(folder))

    def answer(question: Question) -> dict[str, Any]:
        length = max(map(len, question.source)) + question.target_length
        began = time.perf_counter()
        options = genai.GeneratorParams(model)
        # All prompts of a question have one length: padding would be part of the text here.
        options.set_search_options(
            do_sample=False, min_length=length, max_length=length, batch_size=len(question.source)
        )
        generator = genai.Generator(model, options)
        generator.append_tokens(question.source)
        first = 0.0
        while not generator.is_done():
            generator.generate_next_token()
            first = first or time.perf_counter() - began
        seconds = time.perf_counter() - began
        tokens = [generator.get_sequence(row)[len(prompt) :].tolist() for row, prompt in enumerate(question.source)]
        return {"seconds": seconds, "tokens": tokens, "first_seconds": first}

    serve(answers, {"version": f"{folder.name}, onnxruntime-genai {genai.__version__}"}, answer)


def _set_threads(path: Path, threads: int) -> None:
    content = json.loads(path.read_text())
    content["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
