"""The models in the box: whole, and able to speak."""

from __future__ import annotations

from pathlib import Path

from serving.engine.build import EngineSettings, load_engine
from serving.engine.request import DecodingOptions
from serving.manifest import read_manifest
from serving.repository import newest, scan, verify
from serving.tokenizer import TextTokenizer
from tests.support.engines import decode, results

REPOSITORY = Path(__file__).parents[2] / "model_repo"


def test_every_shipped_version_is_whole() -> None:
    repository = scan(REPOSITORY)
    assert not repository.problems
    assert "en-de" in repository.models
    for versions in repository.models.values():
        for version in versions:
            verify(version.folder, version.manifest)


def test_the_default_model_translates_as_the_readme_says() -> None:
    english, german = "The file could not be opened.", "Die Datei konnte nicht geöffnet werden."
    version = newest(scan(REPOSITORY).models["en-de"])
    settings = EngineSettings(threads=1, slots=2, warm_up=False)
    manifest = read_manifest(version.folder)
    engine = load_engine(version.folder, manifest, settings, lambda stats: None)
    tokenizer = TextTokenizer.load(version.folder / manifest.tokenizers.source.file)
    options = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=64)
    answer = results(decode(engine, [(tokenizer.encode(english), options)]))[0]
    assert tokenizer.decode(answer.hypotheses[0].tokens) == german
