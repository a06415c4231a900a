"""Our engine with a language model, driven without a thread: FOLDER THREADS."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime

from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece
from beamline.serving.engine.request import Request
from beamline.serving.models.engines import EngineSettings, load_engine
from tests.benchmarks.peers.beamline_worker import tokens_of
from tests.benchmarks.peers.protocol import Question, serve, take_stdout
from tests.support.engines import step


def main() -> None:
    answers = take_stdout()
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    manifest = read_manifest(folder)
    engine = load_engine(folder, manifest, EngineSettings(threads=threads, slots=16), lambda stats: None)

    def answer(question: Question) -> dict[str, Any]:
        found: dict[int, Output] = {}
        first: dict[int, float] = {}
        length = question.target_length + 1
        options = DecodingOptions(1, num_hypotheses=1, max_length=length, min_length=length)
        began = time.perf_counter()
        for number, prompt in enumerate(question.source):

            def take(output: Output, number: int = number) -> None:
                if isinstance(output, Piece):
                    first.setdefault(number, time.perf_counter() - began)
                else:
                    found[number] = output

            engine.submit(Request(tuple(prompt), options, take, streams=True))
        while engine.busy:
            step(engine)
        seconds = time.perf_counter() - began
        tokens = [tokens_of(found[number]) for number in range(len(question.source))]
        return {"seconds": seconds, "tokens": tokens, "first_seconds": sum(first.values()) / len(first)}

    about = f"{manifest.precision}, onnxruntime {onnxruntime.__version__}"
    serve(answers, {"version": about}, answer)


if __name__ == "__main__":
    main()
