"""PyTorch's own tutorials: converted, served in process, and answering as they do themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn

import beamline
from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.families import converter_for
from beamline.converters.own.layers import trace_as_cells
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.errors import UnsupportedCheckpoint
from beamline.types import TokenIds
from tests.support import tutorial_seq2seq
from tests.support.tutorial_seq2seq import LONGEST, WORDS_IN, WORDS_OUT, Tutorial, evaluate
from tests.support.tutorials import (
    BOS,
    ENGLISH,
    EOS,
    GERMAN,
    greedy_decode,
    ids_of,
    tutorial_transformer,
    write_tutorial_transformer,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # nested tensors, which nobody asked for

LINES = [
    "ein Hund läuft .",
    "zwei Kinder spielen dort .",
    "die kleiner Wiese und die grüne Wiese",
    "Unbekanntes läuft über ein Hund und zwei Kinder und ein Hund .",
]


def load(folder: Path) -> LoadedModel:
    loaded = converter_for(folder, folder / "parts.json").load()
    assert isinstance(loaded, LoadedModel)
    return loaded


def reasons_of(folder: Path, at: Path) -> list[str]:
    """Why a conversion refused; it leaves nothing behind."""
    with pytest.raises(UnsupportedCheckpoint) as caught:
        converter_for(folder, folder / "parts.json").convert("no", at)
    assert not list(at.rglob("*.*"))
    return list(caught.value.reasons)


@pytest.mark.full
def test_the_transformer_tutorial_answers_as_it_does_itself(tmp_path: Path) -> None:
    model = tutorial_transformer()
    folder = write_tutorial_transformer(tmp_path / "source", model)
    converter_for(folder, folder / "parts.json").convert("tutorial", tmp_path / "repository")
    version = tmp_path / "repository" / "tutorial" / "1"
    parity = json.loads((version / "parity.json").read_text())
    sides = [(side["side"], side["words"], side["rows"], side["exact_share"]) for side in parity["vocabularies"]]
    assert sides == [("source", len(GERMAN), len(GERMAN), 1.0), ("target", len(ENGLISH), len(ENGLISH), 1.0)]
    assert [side["example"] for side in parity["vocabularies"]] == ["ein Hund läuft .", "a dog runs ."]
    tokenizers = read_manifest(version).tokenizers
    assert tokenizers.source != tokenizers.target
    with beamline.load(version.parent) as served:
        for line in LINES:
            expected = greedy_decode(model, [BOS, *ids_of(GERMAN, line), EOS], limit=20)
            found = served.translate(line, beam_size=1, max_length=20, return_tokens=True)
            assert found.text == " ".join(ENGLISH[word] for word in expected if word > EOS)
            assert [token.id for token in found.hypotheses[0].tokens if token.id != EOS] == expected
    assert len({tuple(greedy_decode(model, [BOS, *ids_of(GERMAN, line), EOS], 20)) for line in LINES}) > 1


def test_a_position_buffer_that_is_something_else_is_refused(tmp_path: Path) -> None:
    model = tutorial_transformer()
    folder = write_tutorial_transformer(tmp_path / "source", model, max_positions=6000)
    assert reasons_of(folder, tmp_path / "repository") == [
        "parts.json: max_positions is 6000, but positional_encoding.pos_embedding has only 5000"
    ]
    model.positional_encoding.pos_embedding[3] += 0.1
    folder = write_tutorial_transformer(tmp_path / "source", model)
    (reason,) = reasons_of(folder, tmp_path / "repository")
    assert reason.startswith("positional_encoding.pos_embedding is not the table of sinusoidal positions: if it holds")
    # Which helps: named, it is the table.
    name = "positional_encoding.pos_embedding"
    learned = {"positions": "learned", "source_positions": name, "target_positions": name}
    loaded = load(write_tutorial_transformer(tmp_path / "source", model, **learned))
    source, target = torch.tensor([[BOS, 5, 6, 7, EOS]]), torch.tensor([[BOS, 4, 9]])
    with torch.no_grad():
        expected = model.generator(model.decode(target.T, model.encode(source.T))).transpose(0, 1)
        found = loaded.original(source, torch.ones_like(source).bool(), target)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# -- the seq2seq tutorial --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_seq2seq_tutorial_answers_as_it_does_itself(tmp_path: Path) -> None:
    """An nn.GRU in `step`, its weights in the .pt file that the tutorial's torch.save makes."""
    torch.manual_seed(3)
    model = Tutorial().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    torch.save(model.state_dict(), tmp_path / "seq2seq.pt")
    files = []
    for side, size in (("source", WORDS_IN), ("target", WORDS_OUT)):
        words = {word: index for index, word in enumerate(["SOS", "EOS", *(f"{side}{n}" for n in range(size - 2))])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="SOS"))
        tokenizer.save(str(tmp_path / f"{side}.json"))
        files.append(tmp_path / f"{side}.json")
    own = OwnFiles(tmp_path / "seq2seq.pt", *files)
    converter_for(Path(f"{tutorial_seq2seq.__file__}:build"), own=own).convert("seq2seq", tmp_path / "repository")
    parity = json.loads((tmp_path / "repository" / "seq2seq" / "1" / "parity.json").read_text())
    assert (parity["beam_exact_share"], parity["text_exact_share"]) == (1.0, 1.0)

    random = torch.Generator().manual_seed(0)
    sources = [
        [*torch.randint(2, WORDS_IN, (length,), generator=random).tolist(), EOS] for length in (1, 2, 5, 9, 12, 18)
    ]
    expected = [evaluate(model.encoder, model.decoder, source, limit=LONGEST) for source in sources]
    with beamline.load(tmp_path / "repository" / "seq2seq") as served:
        answers = served.translate([TokenIds(source) for source in sources], max_length=LONGEST, return_tokens=True)
    found = [[token.id for token in answer.hypotheses[0].tokens] for answer in answers]
    ended = [words[:-1] if words[-1] == EOS else words for words in expected]
    assert found == ended
    assert len({tuple(words) for words in ended}) > 3  # the sources matter


def test_an_own_module_with_two_vocabularies_needs_two_tokenizers(tmp_path: Path) -> None:
    torch.save(Tutorial().state_dict(), tmp_path / "seq2seq.pt")
    own = OwnFiles(tmp_path / "seq2seq.pt", tmp_path / "source.json")
    with pytest.raises(UnsupportedCheckpoint, match="reads 20 words and writes 23, two vocabularies: add --target-tok"):
        converter_for(Path(f"{tutorial_seq2seq.__file__}:build"), own=own).load()


@pytest.mark.parametrize(
    "layers",
    [
        nn.GRU(3, 4, batch_first=True),
        nn.LSTM(3, 4, num_layers=2),
        nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, num_layers=2, bias=False),
    ],
    ids=["GRU", "two LSTMs", "RNNs both ways"],
)
def test_over_one_word_layers_are_their_cells(layers: nn.RNNBase) -> None:
    x = torch.randn((5, 1, 3) if layers.batch_first else (1, 5, 3))
    states = tuple(torch.randn(layers.num_layers * (1 + layers.bidirectional), 5, 4) for _ in range(2))
    given: Any = states if layers.mode == "LSTM" else states[0]
    expected = layers(x, given)
    trace_as_cells(layers)
    program = torch.export.export(layers, (x, given), strict=False)
    assert not [node for node in program.graph.nodes if "flat" in str(node.target)]
    torch.testing.assert_close(program.module()(x, given), expected)
    torch.testing.assert_close(layers(x, given), expected)  # in plain PyTorch nothing has changed


# -- two vocabularies ------------------------------------------------------------------------------------------------

TWO = "source_embedding and target_embedding are two tensors; "


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"source_tokenizer": None, "target_tokenizer": None, "tokenizer": "en.json"},
            [
                "parts.json: tokenizer is for one embedding; these are two",
                f"parts.json: {TWO}source_tokenizer, target_tokenizer must say which vocabulary is whose "
                "(the same tokenizer twice, if they share one)",
            ],
        ),
        (
            {"source_example": None},
            [
                f"parts.json: {TWO}source_example must say which vocabulary is whose "
                "(the same tokenizer twice, if they share one)"
            ],
        ),
        (
            {"source_tokenizer": "en.json"},
            [
                "source_example: 'ein Hund läuft .' must become [2, 4, 6, 7, 17, 3], but source_tokenizer makes "
                "[2, 0, 0, 0, 18, 3] of it"
            ],
        ),
        (
            {"source_tokenizer": "en.json", "target_tokenizer": "de.json"},
            [
                "source_example: 'ein Hund läuft .' must become [2, 4, 6, 7, 17, 3], but source_tokenizer makes "
                "[2, 0, 0, 0, 18, 3] of it",
                "target_example: 'a dog runs .' must become [4, 6, 7, 18], but target_tokenizer makes "
                "[0, 0, 0, 17] of it",
            ],
        ),
        (
            {"source_example": {"text": "Unbekanntes", "ids": [2, 0, 3]}},
            [
                "source_example: 'Unbekanntes' becomes the same ids with either tokenizer: take a text that tells them "
                "apart"
            ],
        ),
    ],
    ids=["one", "no example", "the target's", "swapped", "tells nothing"],
)
def test_a_wrong_vocabulary_is_refused(tmp_path: Path, changes: dict[str, Any], reasons: list[str]) -> None:
    """Though both have the embedding's size: the words alone say it."""
    size = max(len(GERMAN), len(ENGLISH))
    folder = write_tutorial_transformer(tmp_path / "source", tutorial_transformer(size, size), **changes)
    assert reasons_of(folder, tmp_path / "repository") == reasons
