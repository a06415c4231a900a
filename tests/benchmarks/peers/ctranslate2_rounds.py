"""The same by CTranslate2, in its own environment: MODEL SOURCE OUT BEAM THREADS PIECES COMPUTE_TYPE
HOW: `intra`, all threads for a batch, or `inter`, a batch for each."""

from __future__ import annotations

import sys

import ctranslate2
import sentencepiece

from tests.benchmarks.peers import rounds

_BATCH = 32
_NGRAM = 5  # as model_repo/en-de/serving.toml has it


def main() -> None:
    model, source, out, beam, threads, pieces, compute_type, how = sys.argv[1:]
    inter, intra = (int(threads), 1) if how == "inter" else (1, int(threads))
    translator = ctranslate2.Translator(
        model, device="cpu", compute_type=compute_type, inter_threads=inter, intra_threads=intra
    )
    text = sentencepiece.SentencePieceProcessor(model_file=pieces)

    def translate(lines: list[str]) -> list[str]:
        sources = [[*text.encode(line, out_type=str), "</s>"] for line in lines]
        found = translator.translate_batch(
            sources, beam_size=int(beam), max_batch_size=_BATCH, no_repeat_ngram_size=_NGRAM
        )
        return [text.decode(each.hypotheses[0]) for each in found]

    rounds.run(source, out, translate)


if __name__ == "__main__":
    main()
