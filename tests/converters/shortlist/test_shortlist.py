"""Lexical tables: what model 1 learns, what a version gets of it, and what is refused."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from beamline.converters.shortlist import alignment
from beamline.converters.shortlist.alignment import LexicalTable, Sentences, learn
from beamline.serving.cli import main
from beamline.serving.contract.manifest import Manifest, read_manifest
from beamline.serving.contract.shortlist import load_lexicon
from beamline.serving.errors import ModelError
from beamline.serving.models.engines import EngineSettings, load_engine
from beamline.serving.models.repository import newest, scan, verify
from beamline.serving.models.settings import ModelSettings, apply
from beamline.serving.text.tokenizer import TextTokenizer
from tests.serving.engine.test_engine import BEAM
from tests.support.engines import decode, results

SHIPPED = Path(__file__).parents[3] / "model_repo" / "en-de"
GERMAN = ["das haus", "das buch", "ein buch", "ein haus", "das rote haus", "ein rotes buch"]
ENGLISH = ["the house", "the book", "a book", "a house", "the red house", "a red book"]


class Words:
    """Numbers for words, in the order of their coming."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.numbers: dict[str, int] = {}
        self.lines = [[self.numbers.setdefault(word, len(self.numbers)) for word in line.split()] for line in lines]


def learned(source: Words, target: Words, rounds: int) -> LexicalTable:
    sentences = Sentences.of(source.lines), Sentences.of(target.lines)
    return learn(*sentences, len(source.numbers), len(target.numbers), rounds)


def as_dictionary(table: LexicalTable) -> dict[tuple[int, int], float]:
    pairs = zip(table.source.tolist(), table.target.tolist(), strict=True)
    return dict(zip(pairs, table.probability.tolist(), strict=True))


@pytest.mark.parametrize("rounds", [5, 20])
def test_words_find_their_translations(rounds: int) -> None:
    """No line says which word is which; only all of them together do."""
    source, target = Words(GERMAN), Words(ENGLISH)
    best = learned(source, target, rounds).best(1, 0.0)
    english = {number: word for word, number in target.numbers.items()}
    german = {number: word for word, number in source.numbers.items()}
    found = {german[s]: english[t] for s, t in as_dictionary(best) if s in german}
    assert found == {"das": "the", "haus": "house", "buch": "book", "ein": "a", "rote": "red", "rotes": "red"}


def plain_model_1(source: Words, target: Words, rounds: int) -> dict[tuple[int, int], float]:
    """The same by the book, a word at a time."""
    null = len(source.numbers)
    table: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for _ in range(rounds):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        for sentence, translation in zip(source.lines, target.lines, strict=True):
            for word in translation:
                total = sum(table[each, word] for each in [*sentence, null])
                for each in [*sentence, null]:
                    counts[each, word] += table[each, word] / total
        totals: dict[int, float] = defaultdict(float)
        for (each, _), count in counts.items():
            totals[each] += count
        table = defaultdict(float, {pair: count / totals[pair[0]] for pair, count in counts.items()})
    return dict(table)


def test_it_is_model_1_however_the_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)

    def lines(words: int) -> Words:
        return Words([" ".join(str(chance.randrange(words)) for _ in range(chance.randint(1, 9))) for _ in range(60)])

    source, target = lines(12), lines(15)
    expected = plain_model_1(source, target, rounds=4)
    monkeypatch.setattr(alignment, "_MERGE", 50)
    for links in (1, 100, 10_000):
        monkeypatch.setattr(alignment, "_LINKS", links)
        assert as_dictionary(learned(source, target, rounds=4)) == pytest.approx(expected, abs=1e-12)


def test_the_best_are_kept() -> None:
    table = LexicalTable(
        np.array([0, 0, 0, 2, 2]), np.array([1, 3, 4, 0, 1]), np.array([0.2, 0.5, 0.3, 0.9, 0.1]), null_word=2
    )
    assert as_dictionary(table.best(2, 0.15)) == {(0, 3): 0.5, (0, 4): 0.3, (2, 0): 0.9}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A copy of the shipped model; both of its languages share a vocabulary."""
    shutil.copytree(SHIPPED, tmp_path / "repository" / SHIPPED.name)
    return newest(scan(tmp_path / "repository").models[SHIPPED.name]).folder


def text_of(folder: Path, manifest: Manifest) -> tuple[list[str], list[str], dict[int, int]]:
    """Lines of words of the model's own, and what each source word is always translated with."""
    side = TextTokenizer.load(folder / manifest.tokenizers.source.file)
    texts = {number: side.decode([number]) for number in range(5000, 5200)}
    words = [number for number, text in texts.items() if text and side.encode_prefix(text) == [number]]
    pairs = dict(zip(words[:20], words[20:40], strict=True))
    chance = random.Random(0)
    lines = [chance.sample(sorted(pairs), 3) for _ in range(200)]
    english = [" ".join(texts[word] for word in line) for line in lines]
    german = [" ".join(texts[pairs[word]] for word in chance.sample(line, len(line))) for line in lines]
    return english, german, pairs


def write_text(folder: Path, source: Sequence[str], target: Sequence[str]) -> list[str]:
    for name, lines in (("source", source), ("target", target)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ["--source", str(folder / "source"), "--target", str(folder / "target")]


def test_a_version_gets_its_table_and_serves_with_it(
    version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    english, german, pairs = text_of(version, read_manifest(version))
    text = write_text(tmp_path, english, german)
    command = ["shortlist", "en-de", "--repo", str(version.parents[1]), *text, "--frequent", "3"]
    assert main([*command, "--best", "1"]) == 0
    assert "200 of 200 pairs" in capsys.readouterr().out
    first = read_manifest(version)
    table = load_lexicon(version, first)
    found = {word: set(table.words[table.offsets[word] : table.offsets[word + 1]].tolist()) for word in pairs}
    right = [word for word, translation in pairs.items() if found[word] == {translation, word}]
    assert right == list(pairs)  # and a word may be copied
    assert set(first.vocabulary.eos_ids) <= set(table.always.tolist())

    assert main(command) == 0  # another one takes its place
    manifest = read_manifest(version)
    assert manifest.shortlist != first.shortlist
    assert len(list(version.glob("*shortlist*"))) == 1
    verify(version, manifest)
    assert apply(ModelSettings(shortlist=True), manifest, version / "serving.toml") == manifest
    engine = load_engine(version, manifest, EngineSettings(threads=1, slots=2, shortlist=True), lambda stats: None)
    table = load_lexicon(version, manifest)
    source = tuple(sorted(pairs)[:2])
    (answer,) = results(decode(engine, [(source, BEAM)]))
    allowed = set(np.flatnonzero(table.allowed(source, manifest.vocabulary.eos_ids, manifest.vocabulary.target_size)))
    assert len(allowed) < manifest.vocabulary.target_size
    assert set(answer.hypotheses[0].tokens) <= allowed


def test_what_can_not_be_learned_from_is_refused(
    version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_manifest(version)
    repository = ["en-de", "--repo", str(version.parents[1])]
    assert main(["shortlist", *repository, *write_text(tmp_path, ["a", "b"], ["c"])]) == 2
    assert "has 2 lines" in capsys.readouterr().err
    assert main(["shortlist", *repository, *write_text(tmp_path, [""], [""]), "--rounds", "0"]) == 2
    assert "from 1 on" in capsys.readouterr().err
    assert main(["shortlist", "nobody", *repository[1:], *write_text(tmp_path, ["a"], ["b"])]) == 2
    assert "there is no model nobody" in capsys.readouterr().err
    with pytest.raises(ModelError, match=f"asks for a shortlist, but en-de version {before.version} has none"):
        apply(ModelSettings(shortlist=True), before, version / "serving.toml")
    assert read_manifest(version) == before
