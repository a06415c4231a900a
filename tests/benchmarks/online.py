"""`python -m tests.benchmarks.online`: requests a second that hold a latency limit, beside CTranslate2 behind a server.

The same checkpoint, the same texts with Poisson arrivals, the same two cores for server and load tester, one server at
a time. The limit is twice what the reference needs at p95 for one client that waits for each answer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from beamline.loadtest.report.document import Report, Stage, read
from tests.benchmarks import shape
from tests.benchmarks.environments import python_of
from tests.benchmarks.prose import english_sentences
from tests.benchmarks.table import print_table
from tests.support.processes import ROOT, beamline, environment, serving

CHECKPOINT = ROOT / "examples" / "translation" / "checkpoints" / "en-de"
REFERENCES = {"CT2 fp32": "float32", "CT2 int8": "int8"}
PRECISIONS = {"ours": "float32", "ours int8": "int8"}


class Measurements:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.texts = folder / "texts.txt"
        if options.texts:
            self.texts = options.texts.resolve()
        else:
            self.texts.write_text("\n".join(english_sentences(1000)) + "\n", encoding="utf-8")
        cache = options.cache.resolve()
        self.python = python_of("ctranslate2")
        self.reference = shape.reference_for_ctranslate2(cache, CHECKPOINT, self.python)
        self.repositories = {
            name: shape.converted(cache, CHECKPOINT, precision) for name, precision in PRECISIONS.items()
        }

    @contextmanager
    def peer(self, compute_type: str) -> Iterator[str]:
        threads = str(self.options.threads)
        command = [str(self.python), "-m", "tests.benchmarks.peers.ctranslate2_server", "--port", "0"]
        command += ["--model", str(self.reference)]
        command += ["--pieces", str(CHECKPOINT / "spm.model"), "--compute-type", compute_type, "--threads", threads]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split()[-1]
            finally:
                process.terminate()

    @contextmanager
    def ours(self, name: str) -> Iterator[str]:
        where = ("--repo", str(self.repositories[name]), "--threads", str(self.options.threads))
        with serving(self.folder / "log.txt", *where) as server:
            yield server.grpc

    def server(self, name: str) -> AbstractContextManager[str]:
        return self.peer(REFERENCES[name]) if name in REFERENCES else self.ours(name)

    def load(self, target: str, *arguments: str) -> Report:
        out = self.folder / "out"
        command = beamline("loadtest", "--target", target, "--texts", str(self.texts), "--out", str(out), "--quiet")
        command += ["--options", f"beam_size={self.options.beam}", "--workers", "1", "--overwrite", *arguments]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=False)
        return read(out)

    def one_client(self, name: str) -> Stage:
        with self.server(name) as target:
            report = self.load(target, "--clients", "1", "--duration", f"{self.options.seconds}s", "--warmup", "3s")
        return report.stages[0]

    def highest_rate(self, name: str, limit: float, start: float) -> float:
        search = ("--slo", f"p95={1000 * limit:.1f}ms", "--rate", f"{start:.2f}")
        with self.server(name) as target:
            found = self.load(target, *search, "--duration", f"{self.options.seconds}s", "--warmup", "2s").search
        assert found is not None
        return found.rate or 0.0


def p95(stage: Stage) -> float:
    assert stage.latency is not None
    return next(each.seconds for each in stage.latency.percentiles if each.share == 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.online", description=__doc__)
    parser.add_argument("--texts", type=Path, help="one a line (default: sentences of Python's documentation)")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=15, help="of every stage (default: 15)")
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many searches counts (default: 2)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where the models are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(options, Path(folder))
        alone = {name: measurements.one_client(name) for name in (*REFERENCES, *PRECISIONS)}
        limit = 2 * min(p95(alone[name]) for name in REFERENCES)
        rates: dict[str, float] = dict.fromkeys(alone, 0.0)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} ...", flush=True)
            for name in alone:
                found = measurements.highest_rate(name, limit, max(1.0, alone[name].throughput))
                rates[name] = max(rates[name], found)
    _print(alone, rates, limit, options)


def _print(alone: dict[str, Stage], rates: dict[str, float], limit: float, options: argparse.Namespace) -> None:
    rival = max(rates[name] for name in REFERENCES)
    rows: list[Sequence[str]] = [
        ("server", "one client, p95", "its answers/s", "requests/s in the limit", "/ best CT2")
    ]
    for name, stage in alone.items():
        ratio = f"{rates[name] / rival:.2f}x" if rival else "-"
        rows.append((name, f"{1000 * p95(stage):.0f} ms", f"{stage.throughput:.1f}", f"{rates[name]:.1f}", ratio))
    print(f"\nen-de, beam {options.beam}, {options.threads} threads, shared with the load tester ({sys.platform});")
    print(f"limit: p95 <= {1000 * limit:.0f} ms under Poisson arrivals\n")
    print_table(rows)


if __name__ == "__main__":
    main()
