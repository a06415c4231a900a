"""python -m tests.benchmarks.g2p: the package g2p-en's own numpy code beside its model served by our engine.

Both in turn, several rounds, the best of each: words per second, one word at a time and many at once, on one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.request import Request
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.engines import step
from tests.support.g2p import Package, convert_g2p, english_words

OPTIONS = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=21)


class Ours:
    def __init__(self, folder: Path, slots: int) -> None:
        manifest = read_manifest(folder)
        self._engine = Engine(
            manifest, CpuBackend(folder, manifest, threads=1), Plan.of(manifest, slots), max_queue=100_000
        )
        self._letters = TextTokenizer.load(folder / manifest.tokenizers.source.file)
        self._phonemes = TextTokenizer.load(folder / manifest.tokenizers.target.file)

    def predict(self, words: list[str], at_once: bool) -> tuple[list[str], float]:
        """Text in, text out; the engine's own loop, without the network."""
        began = time.perf_counter()
        answers: dict[int, str] = {}
        for number, word in enumerate(words):

            def take(answer: Output, number: int = number) -> None:
                assert isinstance(answer, Result)
                answers[number] = self._phonemes.decode(answer.hypotheses[0].tokens)

            self._engine.submit(Request(tuple(self._letters.encode(word)), OPTIONS, take))
            while self._engine.busy and not at_once:
                step(self._engine)
        while self._engine.busy:
            step(self._engine)
        return [answers[number] for number in range(len(words))], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.g2p", description=__doc__)
    parser.add_argument("--words", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    words = english_words(options.words)
    with Package() as package, tempfile.TemporaryDirectory() as folder:
        version = convert_g2p(package.weights, Path(folder))
        single, many = Ours(version, 1), Ours(version, options.slots)
        theirs: list[float] = []
        alone: list[float] = []
        together: list[float] = []
        for _ in range(options.rounds):
            predicted = package.predict(words)
            expected = [" ".join(phonemes) for phonemes in predicted.phonemes]
            theirs.append(predicted.seconds)
            for ours, times, at_once in ((single, alone, False), (many, together, True)):
                found, seconds = ours.predict(words, at_once)
                assert found == expected, "the answers differ: no comparison"
                times.append(seconds)
        print(f"{len(words)} words, best of {options.rounds} rounds, one thread each; all answers identical")
        print(f"  {package.version + ', one by one':<34}{len(words) / min(theirs):9,.0f} words/s")
        for name, times in (("beamline, one by one", alone), (f"beamline, {options.slots} at once", together)):
            rate = len(words) / min(times)
            print(f"  {name:<34}{rate:9,.0f} words/s  {min(theirs) / min(times):6.2f} x the package")


if __name__ == "__main__":
    main()
