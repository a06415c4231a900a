"""`python -m tests.benchmarks.offline --source test.en --reference test.de`: a whole file, beside CTranslate2.

The checkpoint of the shipped en-de, translated by `beamline translate --file` through a server, and by CTranslate2 in
process, sorted by length as it does itself; in turn, on the same cores. Printed are lines a second and BLEU. Ours has
the client's start, text and network in it, CTranslate2's only its work.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import sacrebleu

from tests.benchmarks import shape
from tests.benchmarks.environments import python_of
from tests.benchmarks.online import CHECKPOINT, PRECISIONS, REFERENCES
from tests.benchmarks.table import print_table
from tests.support.processes import ROOT, run_beamline, serving


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.offline", description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many counts (default: 2)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where the models are kept")
    options = parser.parse_args()
    references = options.reference.read_text(encoding="utf-8").splitlines()
    best: dict[str, float] = {}
    answers: dict[str, list[str]] = {}
    for _ in range(options.rounds):
        for name in (*REFERENCES, *PRECISIONS):
            seconds, answers[name] = _theirs(name, options) if name in REFERENCES else _ours(name, options)
            best[name] = min(seconds, best.get(name, seconds))
    rival = min(best[name] for name in REFERENCES)
    rows = [("", "lines/s", "/ best CT2", "BLEU", "chrF")]
    for name, seconds in best.items():
        bleu = sacrebleu.corpus_bleu(answers[name], [references]).score
        chrf = sacrebleu.corpus_chrf(answers[name], [references]).score
        rate = len(references) / seconds
        rows.append((name, f"{rate:.1f}", f"{rival / seconds:.2f}x", f"{bleu:.2f}", f"{chrf:.1f}"))
    print(f"\nen-de, {len(references)} lines, beam {options.beam}, {options.threads} threads\n")
    print_table(rows)


def _theirs(name: str, options: argparse.Namespace) -> tuple[float, list[str]]:
    python = python_of("ctranslate2")
    model = shape.reference_for_ctranslate2(options.cache, CHECKPOINT, python)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        command: list[str | Path] = [
            python,
            "-m",
            "tests.benchmarks.peers.ctranslate2_file",
            model,
            CHECKPOINT / "spm.model",
        ]
        command += [options.source.resolve(), out, REFERENCES[name], str(options.beam), str(options.threads)]
        seconds = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
        return float(seconds), out.read_text(encoding="utf-8").splitlines()


def _ours(name: str, options: argparse.Namespace) -> tuple[float, list[str]]:
    """The best of two passes, as theirs."""
    repository = shape.converted(options.cache, CHECKPOINT, PRECISIONS[name])
    asked = ("translate", "--file", str(options.source.resolve()), "--beam", str(options.beam), "--no-split")
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        where = ("--repo", str(repository), "--threads", str(options.threads))
        with serving(Path(folder) / "log.txt", *where) as server:
            for _ in range(2):
                began = time.perf_counter()
                done = run_beamline(*asked, "--target", server.grpc)
                seconds.append(time.perf_counter() - began)
                assert done.returncode == 0, done.stderr
    return min(seconds), done.stdout.splitlines()


if __name__ == "__main__":
    main()
