"""Translates a file by CTranslate2, in its own environment: MODEL PIECES SOURCE OUT COMPUTE_TYPE BEAM THREADS. Prints
the seconds that the best of two passes took, without loading the model."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ctranslate2
import sentencepiece

_BATCH = 32


def main() -> None:
    model, pieces, source, out, compute_type, beam, threads = sys.argv[1:]
    translator = ctranslate2.Translator(
        model, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=int(threads)
    )
    text = sentencepiece.SentencePieceProcessor(model_file=pieces)
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        sources = [[*text.encode(line, out_type=str), "</s>"] for line in lines]
        found = translator.translate_batch(sources, beam_size=int(beam), max_batch_size=_BATCH)
        answers = [text.decode(each.hypotheses[0]) for each in found]
        seconds.append(time.perf_counter() - began)
    Path(out).write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    print(min(seconds))


if __name__ == "__main__":
    main()
