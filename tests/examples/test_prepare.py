"""Training text from archives and our own phrases, and the vocabulary with more letters."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor

from beamline.converters.checkpoints.sentencepiece_files import from_sentencepiece
from beamline.serving.text.tokenizer import TextTokenizer
from examples.translation import augment
from examples.translation.augment import Pair
from examples.translation.data import read_lines, train_vocabulary
from examples.translation.extend import CHARACTERS, extend
from examples.translation.first_words import COPIES, FOLDER, SEEN, VISITORS, read_judgements, read_pairs
from examples.translation.models import VOCABULARY, build, export, weights_of
from examples.translation.prepare import comparable, main
from examples.translation.settings import Settings
from tests.support.text import english_lines

SHIPPED = Path(__file__).parents[2] / "examples/translation/checkpoints/en-de"


def write_archive(path: Path, files: dict[str, list[str]]) -> None:
    with tarfile.open(path, "w:xz") as archive:
        for name, lines in files.items():
            content = "".join(f"{line}\n" for line in lines).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def archives(tmp_path: Path) -> list[str]:
    many = [f"Tom has {n} cats." for n in range(2, 300)]
    german = [f"Tom hat {n} Katzen." for n in range(2, 300)]
    write_archive(
        tmp_path / "text.tar.xz",
        {
            "train.en": ["Open file", "to sleep", "I LOVE YOU!", "The moon"],
            "train.de": ["Datei öffnen", "schlafen", "Ich liebe Sie!", "Der Mond"],
            "train.src": ["mo", "ding", "mo", "mo"],
            **{"valid.en": ["Close file"], "valid.de": ["Datei schließen"], "valid.src": ["mo"]},
            **{"test.en": ["THE MOON"], "test.de": ["MOND"], "test.src": ["mo"]},
        },
    )
    write_archive(
        tmp_path / "everyday.tar.xz",
        {
            "tatoeba.en": [*many, "I love you.", "Shut the file."],
            "tatoeba.de": [*german, "Ich liebe dich.", "Datei schließen"],
            "tatoeba-valid.en": ["It works."],
            "tatoeba-valid.de": ["Es geht."],
        },
    )
    return ["--text", str(tmp_path / "text.tar.xz"), "--everyday", str(tmp_path / "everyday.tar.xz")]


def test_a_folder_is_made_without_what_is_held_out(archives: list[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        main([*archives, "--out", str(tmp_path / name)])
    out = tmp_path / "one"
    names = {f"{split}.{end}" for split in ("train", "valid", "test", "tatoeba-valid") for end in ("en", "de", "src")}
    assert {file.name for file in out.iterdir()} == names
    assert all((out / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)

    sources, targets, origins = (read_lines(out / f"train.{end}") for end in ("en", "de", "src"))
    assert len(sources) == len(targets) == len(origins)
    counts = Counter(origins)
    assert counts["mo"] == 2  # without "I LOVE YOU!"
    assert counts["tatoeba"] == 298  # without "I love you.", and without what translates to a line of valid
    assert counts["phrases"] == len(read_lines(FOLDER / "phrases.tsv"))
    assert counts.keys() >= {"ding", "caps", "lower", "unmarked", "decorated", "slot", "copy", "template"}
    visitors = {comparable(sentence) for sentence, _ in read_pairs(VISITORS)}
    assert not visitors & {comparable(line) for line in sources}
    assert not {"Datei schließen", "THE MOON", "MOND", "It works.", "Es geht."} & {*sources, *targets}
    assert not set(read_lines(COPIES)) & set(sources)


def test_an_archive_of_other_files_is_refused(archives: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"must hold one NAME-valid\.en; it has test\.de"):
        main([*archives[:2], "--everyday", archives[1], "--out", str(tmp_path / "out")])


def test_the_first_words_are_what_they_say() -> None:
    visitors, phrases = (read_pairs(FOLDER / f"{name}.tsv") for name in ("visitors", "phrases"))
    copied = read_lines(COPIES)
    assert len({comparable(sentence) for sentence, _ in visitors}) == len(set(copied)) == 100
    assert not {comparable(s) for s, _ in visitors} & {comparable(s) for s, _ in phrases}
    assert len({source for source, _ in phrases}) == len(phrases) > 500
    assert {*read_lines(SEEN), *(sentence for sentence, _ in read_judgements())} <= {
        sentence for sentence, _ in visitors
    }
    for source, target in read_pairs(FOLDER / "templates.tsv"):
        assert source.count("{}") == target.count("{}") > 0


def test_pairs_are_varied_where_that_is_safe() -> None:
    question = Pair("Where is Tom?", "Wo ist Tom?", "x")
    assert augment.upper(Pair("The street", "Die Straße", "x")) == ("THE STREET", "DIE STRASSE", "caps")
    assert augment.upper(Pair("Open %s", "%s öffnen", "x")) is None
    assert augment.lower(question) == ("where is tom?", "Wo ist Tom?", "lower")
    assert augment.without_question_mark(question) == ("Where is Tom", "Wo ist Tom?", "unmarked")
    assert augment.without_question_mark(Pair("Tom?", "Tom?", "x")) is None  # without its mark it asks nothing
    assert augment.without_full_stop(Pair("I am.", "Ich bin.", "x")) == ("I am", "Ich bin", "unmarked")
    assert augment.without_full_stop(Pair("Wait...", "Warte ...", "x")) is None
    random = Random(1)
    assert augment.replaced(Pair("Tom saw Tom.", "Tom sah Tom.", "x"), random) is None
    assert augment.replaced(Pair("It is 5.", "Es ist fünf.", "x"), random) is None
    for _ in range(200):
        made = augment.replaced(question, random)
        assert made
        assert made.source.startswith("Where is ")
        assert made.target == f"Wo ist {made.source.removeprefix('Where is ')}"
        decorated = augment.decorated(question, random)
        assert decorated
        assert decorated.source.replace(question.source, "") == decorated.target.replace("Wo ist Tom?", "")
    years = augment.replaced(Pair("In 1970 we met.", "1970 trafen wir uns.", "x"), random)
    assert years
    assert years.source[3:7] == years.target[:4] != "1970"


def test_what_is_to_be_copied_can_be() -> None:
    vocabulary = SentencePieceProcessor(model_file=str(SHIPPED / "spm.model"))
    pairs = [*augment.copies(Random(1), 3000)]
    lost = [pair.source for pair in pairs if vocabulary.decode(vocabulary.encode(pair.source)) != pair.target]
    assert not lost
    assert all(pair.source == pair.target for pair in pairs)
    for pair in augment.filled(Random(1), [("Give {} to {}", "Gib {} an {}")], 300):
        assert pair.target == pair.source.replace("Give ", "Gib ", 1).replace(" to ", " an ", 1)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint whose vocabulary knows the letters of English alone."""
    folder = tmp_path / "plain"
    folder.mkdir()
    lines = "".join(f"{line}\n" for line in english_lines()[:2000])
    for side in ("en", "de"):
        (folder / f"train.{side}").write_text(lines)
    architecture = {"d_model": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "ffn": 16}
    settings = Settings(source="en", target="de", model="transformer", architecture=architecture, vocab_size=600)
    train_vocabulary(settings, folder, folder / VOCABULARY)
    model = build(settings.model, architecture, settings.vocab_size)
    export(folder, model, weights_of(model), folder / VOCABULARY)
    return folder


def test_a_vocabulary_gets_more_letters(plain: Path, tmp_path: Path) -> None:
    """What was written in bytes is one piece, all else is written as before."""
    before = SentencePieceProcessor(model_file=str(plain / VOCABULARY))
    added = extend(plain, tmp_path)
    after = SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = before.get_piece_size()
    assert after.get_piece_size() == size + len(added)
    for letter in CHARACTERS:
        assert len(after.encode(f"x{letter}")) == len(after.encode("x")) + 1
    assert after.encode("Öl", out_type=str) == ["\u2581Ö", "l"]
    for text in ("Where is the train station?", "7 % of them", "你好"):
        assert after.encode(text) == before.encode(text)
    text = "Öl, „ja“ – 5 € 😀 ❤️ café"
    assert after.decode(after.encode(text)) == text
    from_sentencepiece(tmp_path / "spm.model", add_eos=True).save(tmp_path / "tokenizer.json")
    served = TextTokenizer.load(tmp_path / "tokenizer.json")
    assert served.encode_batch([text])[0] == [*after.encode(text), after.eos_id()]

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["source_vocab_size"] == config["target_vocab_size"] == size + len(added)
    old, new = load_file(plain / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    changed = [name for name in old if old[name].shape != new[name].shape]
    assert changed
    for name in changed:
        torch.testing.assert_close(new[name][:size], old[name], rtol=0, atol=0)
        spelling = [before.piece_to_id(piece) for piece in ("<0xC3>", "<0x96>")]
        expected = old[name][spelling].float().mean(dim=0).to(old[name].dtype)
        torch.testing.assert_close(new[name][after.piece_to_id("Ö")], expected, rtol=0, atol=0)
    assert extend(tmp_path, tmp_path / "again") == []
