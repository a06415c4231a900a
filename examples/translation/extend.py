"""More characters for the vocabulary of a trained checkpoint: each becomes one piece instead of two to four bytes.

python -m examples.translation.extend CHECKPOINT --out DIRECTORY

A new piece goes behind the old ones, so that their ids and weights stay; its rows in the embedding and the output begin
as the mean of the pieces by which the character was written so far. Training has to go on afterwards
(`train.py --init DIRECTORY`).
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from torch import Tensor

from examples.translation.models import CONFIG, VOCABULARY, WEIGHTS, load

protobuf: Any = sentencepiece_model_pb2  # made when it is imported: mypy finds no classes in it
SPACE = "\u2581"  # how sentencepiece writes it
LETTERS = "ÄÖÜäöüßẞ" + "éèêëáàâãåæçñóòôõøíìîïúùûýœšžčł" + "ÉÈÁÀÅÆÇÑÓØÍÚŠŽČŁ"
SIGNS = "„“”‚‘’»«–—·•°§©®×÷±→←€£¥¿¡μ"
EMOJI = (
    "🙂😆🥰😋😴🤷😀😃😄😁😅😂🤣😊😉😍😘😎🤔😢😭😡👍👎👏🙏👋💪👀💯🎉🎂🎁🔥⭐✨✅❌❤💔💙💡🚀☀🌍🐱🐶🍕☕⚠📧📞"
    + "\ufe0f\u200d"
)
CHARACTERS = LETTERS + SIGNS + EMOJI
WORD_STARTS = "ÄÖÜ„–"  # also with the space before them, as every other common initial has it
ROWS = ("source_vocab_size", "target_vocab_size")  # of the config: what counts them


def new_pieces(vocabulary: SentencePieceProcessor) -> list[str]:
    """What CHARACTERS and WORD_STARTS lack there. A character that is normalised to others would never be used."""
    wanted = [*CHARACTERS, *(SPACE + initial for initial in WORD_STARTS)]
    rewritten = [c for c in CHARACTERS if unicodedata.normalize("NFKC", c) != c]
    assert not rewritten, rewritten
    return [piece for piece in wanted if vocabulary.piece_to_id(piece) == vocabulary.unk_id()]


def extended_model(model: bytes, pieces: list[str]) -> bytes:
    """The sentencepiece model with `pieces` behind its own, merged after all others."""
    proto = protobuf.ModelProto.FromString(model)
    lowest = min(piece.score for piece in proto.pieces)
    for number, piece in enumerate(pieces, 1):
        proto.pieces.add(piece=piece, score=lowest - number)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return bytes(proto.SerializeToString())


def extended_rows(rows: Tensor, spellings: list[list[int]]) -> Tensor:
    """`rows` [V, d] and one more for each spelling: the mean of its pieces' rows."""
    means = [rows[ids].float().mean(dim=0).to(rows.dtype) for ids in spellings]
    return torch.cat([rows, torch.stack(means)]) if means else rows


def extend(checkpoint: Path, out: Path) -> list[str]:
    """Writes the checkpoint directory `out`; what was added."""
    described = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    vocabulary = SentencePieceProcessor(model_file=str(checkpoint / VOCABULARY))
    size = vocabulary.get_piece_size()
    if any(described[name] != size for name in ROWS):
        raise ValueError(f"{checkpoint}: the vocabulary has {size} pieces, the model {[described[n] for n in ROWS]}")
    pieces = new_pieces(vocabulary)
    space = vocabulary.piece_to_id(SPACE)
    spellings = []
    for piece in pieces:
        ids = vocabulary.encode(piece.removeprefix(SPACE))  # begins with a space, whether the piece has it or not
        spellings.append(ids if piece.startswith(SPACE) else [i for i in ids if i != space])
    # of every tensor, those that have a row (or, biases, a value) for each piece
    weights = {
        name: extended_rows(tensor, spellings) if tensor.shape[0] == size else tensor
        for name, tensor in load_file(checkpoint / WEIGHTS).items()
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / VOCABULARY).write_bytes(extended_model((checkpoint / VOCABULARY).read_bytes(), pieces))
    changed = described | {name: size + len(pieces) for name in ROWS}
    (out / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out / WEIGHTS)
    load(out)  # which refuses a tensor of another shape than the config says
    return pieces


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.translation.extend", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    options = parser.parse_args(given)
    try:
        pieces = extend(options.checkpoint, options.out)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
    print(f"{len(pieces)} pieces added: {' '.join(pieces)}")


if __name__ == "__main__":
    main()
