"""SmolLM2-135M beside llama.cpp, Hugging Face and onnxruntime-genai: tokens a second, and the time to the first token.

    make demo-lm                              # converts it; stop the server once it is ready
    python -m tests.benchmarks.language

Every system gets the same prompts, all at once, and gives exactly so many tokens to each; they take turns. Each is
compared with ours in as many bits: weights of 32, of 8 and of 4. A system that can't be set up here is left out, and
the report says why. Ctrl-C ends the rounds early.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import language_models as models
from tests.benchmarks.environments import python_of
from tests.benchmarks.shape import TARGET_LENGTH
from tests.benchmarks.workers import Answer, Worker, wait_for_quiet
from tests.support.text import english_lines

PROMPT_LENGTH = 64


@dataclass(frozen=True)
class System:
    who: str
    kind: str  # as it names its precision
    bits: int  # of most weights
    model: Callable[[str], Path]  # of that kind
    module: str  # of the worker
    environment: str | None = None  # none: ours

    @property
    def name(self) -> str:
        return f"{self.who} {self.kind}"

    def start(self, threads: int) -> Worker:
        python = sys.executable if self.environment is None else python_of(self.environment)
        return Worker(self.name, python, self.module, (self.model(self.kind), threads), threads)


OURS = tuple(
    System("ours", kind, bits, models.ours, "beamline_language_worker")
    for kind, bits in (("float32", 32), ("int8", 8), ("int4", 4))
)
PEERS = (
    System("transformers", "float32", 32, models.for_transformers, "transformers_language_worker", "transformers"),
    System("genai", "fp32", 32, models.for_genai, "genai_worker", "genai"),
    System("llama.cpp", "Q8_0", 8, models.for_llama_cpp, "llama_cpp_worker", "llama_cpp"),
    System("genai", "int8", 8, models.for_genai, "genai_worker", "genai"),
    System("llama.cpp", "Q4_1", 4, models.for_llama_cpp, "llama_cpp_worker", "llama_cpp"),
    System("genai", "int4", 4, models.for_genai, "genai_worker", "genai"),
)
Found = dict[tuple[int, System], list[Answer]]


def main() -> None:
    options = _arguments()
    models.gguf_file()
    counts = [int(part) for part in options.concurrent.split(",")]
    wanted = [each for each in (*OURS, *PEERS) if each.bits in options.bits and each.who not in options.without]
    with ExitStack() as stack:
        workers, missing = _start(wanted, options.threads, stack)
        questions = {count: prompts(models.CONVERTED, count) for count in counts}
        found: Found = {}
        for worker in workers.values():  # the first call of all allocates, packs and compiles
            worker.ask(questions[counts[0]], 1)
        try:
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds} ...", flush=True)
                for count in counts:
                    for system, worker in workers.items():
                        wait_for_quiet(options.patience)
                        found.setdefault((count, system), []).append(worker.ask(questions[count], 1))
        except KeyboardInterrupt:
            print("interrupted; this is what there is", flush=True)
        counts = [count for count in counts if all((count, system) in found for system in workers)]
        _report(workers, missing, counts, found, options.threads)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.language", description=__doc__)
    parser.add_argument("--concurrent", default="1,4,16", help="how many requests at once (default: 1,4,16)")
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4], choices=(32, 8, 4), help="default: all")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default: 2)")
    parser.add_argument("--rounds", type=int, default=5)
    peers = sorted({each.who for each in PEERS})
    parser.add_argument("--without", action="append", default=[], choices=peers, help="leave one out")
    parser.add_argument("--patience", type=float, default=2, help="seconds to wait for a quiet moment (default: 2)")
    return parser.parse_args()


def _start(systems: list[System], threads: int, stack: ExitStack) -> tuple[dict[System, Worker], dict[System, str]]:
    workers, missing = {}, {}
    for system in systems:
        try:
            workers[system] = stack.enter_context(system.start(threads))
        except (subprocess.CalledProcessError, OSError, SystemExit) as error:
            if system in OURS:
                raise
            missing[system] = str(error)
    return workers, missing


def prompts(model: Path, count: int) -> list[list[int]]:
    """Pieces of Python's documentation, all of one length: not every peer takes others together."""
    from beamline.serving.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(model / "tokenizer.json")
    ids = tokenizer.encode_prefix(" ".join(line.strip() for line in english_lines()[200:1200]))
    return [ids[number * PROMPT_LENGTH : (number + 1) * PROMPT_LENGTH] for number in range(count)]


def _report(
    workers: dict[System, Worker], missing: dict[System, str], counts: list[int], found: Found, threads: int
) -> None:
    print(f"\n{PROMPT_LENGTH} tokens in, {TARGET_LENGTH} out, {threads} threads, best of the rounds")
    for system, worker in workers.items():
        print(f"  {system.name}: {worker.version}")
    for system, why in missing.items():
        print(f"  {system.name} is missing: {why}")
    print("\n| bits | at once | system | tokens/s | ours is | first token | ours is | as we | MB | others' CPU |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for own in (each for each in OURS if each in workers):
        for count in counts:
            ours = _best(found[count, own])
            for system in (each for each in workers if each.bits == own.bits):
                best = _best(found[count, system])
                first = _first(found[count, system])
                same = sum(a == b for a, b in zip(ours.tokens, best.tokens, strict=True))
                print(
                    f"| {own.bits} | {count} | {system.name} | {count * TARGET_LENGTH / best.seconds:.1f} "
                    f"| {best.seconds / ours.seconds:.2f}x | {1000 * first:.0f} ms "
                    f"| {first / _first(found[count, own]):.2f}x | {same} of {count} "
                    f"| {best.rss_mb:.0f} | {best.foreign:.0%} |"
                )


def _best(answers: list[Answer]) -> Answer:
    return min(answers, key=lambda answer: answer.seconds)


def _first(answers: list[Answer]) -> float:
    """Seconds to the first token, a request's mean, best of the rounds."""
    return min(float(answer.details["first_seconds"]) for answer in answers)


if __name__ == "__main__":
    main()
