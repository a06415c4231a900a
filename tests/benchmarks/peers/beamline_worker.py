"""Our engine, driven without a thread: FOLDER THREADS."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime

from beamline.serving.contract.manifest import read_manifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.request import Request
from beamline.serving.models.engines import EngineSettings, load_engine
from tests.benchmarks.peers.protocol import Question, serve, take_stdout
from tests.support.engines import step


def main() -> None:
    answers = take_stdout()
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    steps: list[StepStats] = []
    manifest = read_manifest(folder)
    settings = EngineSettings(threads=threads, shortlist=manifest.shortlist is not None)
    engine = load_engine(folder, manifest, settings, steps.append)

    def answer(question: Question) -> dict[str, Any]:
        steps.clear()
        found: dict[int, Output] = {}
        options = DecodingOptions(question.beam, num_hypotheses=1, max_length=question.target_length + 1)
        began = time.perf_counter()
        for number, source in enumerate(question.source):

            def take(answer: Output, number: int = number) -> None:
                found[number] = answer

            engine.submit(Request(tuple(source), options, take))
        while engine.busy:
            step(engine)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": [tokens_of(found[number]) for number in range(len(question.source))],
            "encode_seconds": sum(step.encode_seconds for step in steps),
            "decode_seconds": sum(step.decode_seconds for step in steps),
            "steps": sum(step.active > 0 for step in steps),
        }

    serve(answers, {"version": f"onnxruntime {onnxruntime.__version__}"}, answer)


def tokens_of(answer: Output) -> list[int]:
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Result)
    return list(answer.hypotheses[0].tokens)


if __name__ == "__main__":
    main()
