from __future__ import annotations

from pathlib import Path

import pytest

from beamline.serving.errors import ModelError
from beamline.serving.models.settings import ModelSettings, apply, read_settings
from tests.serving.doubles import small_manifest


def read(folder: Path, text: str) -> ModelSettings:
    (folder / "serving.toml").write_text(text, encoding="utf-8")
    return read_settings(folder)


def test_everything_may_be_left_out(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == ModelSettings()
    assert read(tmp_path, "") == ModelSettings()


def test_every_key_arrives(tmp_path: Path) -> None:
    text = """
        versions = [1, 3]
        slots = 4
        queue = 10
        engines = 2
        prompt_slowdown = 4
        cache_entries = 4096
        device = "cpu"
        precision = "float32"

        [defaults]
        beam_size = 2
        early_stopping = "never"
    """
    assert read(tmp_path, text) == ModelSettings(
        versions=(1, 3),
        slots=4,
        queue=10,
        engines=2,
        prompt_slowdown=4.0,
        cache_entries=4096,
        device="cpu",
        precision="float32",
        defaults={"beam_size": 2, "early_stopping": "never"},
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slot = 4", "unknown keys: slot; known are versions, slots, queue"),
        ("[defaults]\nbeams = 4", "unknown keys: defaults.beams; known are beam_size, num_hypotheses"),
        ("engines = 0", "engines is 0; it must be at least 1"),
        ("slots = 0", "slots is 0; it must be at least 1"),
        ('slots = "4"', "slots is '4'; it must be a whole number"),
        ("versions = []", "versions is []; it must be "),
        ('versions = "latest"', "versions is 'latest'; it must be 'newest' or 'all' or a list"),
        ('device = "abacus"', "device is 'abacus'; it must be 'auto', 'cpu', "),
        ("prompt_slowdown = 0.5", "prompt_slowdown is 0.5; it must be at least 1"),
        ("prompt_slowdown = true", "prompt_slowdown is True; it must be a number"),
        ("cache_entries = 0", "cache_entries is 0; it must be at least 1"),
        ("slots =", "is not TOML"),
    ],
)
def test_mistakes_are_told_with_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/serving.toml ")
    assert sentence in str(caught.value)


def test_defaults_go_before_those_of_the_manifest(tmp_path: Path) -> None:
    manifest = small_manifest()
    settings = ModelSettings(defaults={"beam_size": 2, "length_penalty": 0.6})
    changed = apply(settings, manifest, tmp_path)
    assert (changed.defaults.beam_size, changed.defaults.length_penalty) == (2, 0.6)
    assert changed.defaults.max_length == manifest.defaults.max_length
    assert apply(ModelSettings(), manifest, tmp_path) is manifest


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (ModelSettings(defaults={"beam_size": 99}), "beam_size is above limits.max_beam_size"),
        (ModelSettings(defaults={"beam_size": "two"}), "defaults.beam_size is 'two'; it must be a whole number"),
        (ModelSettings(prompt_slowdown=4.0), "has prompt_slowdown, but .* takes in no prompts"),
        (ModelSettings(cache_entries=1), "has cache_entries 1, but a single beam of .* it must be at least that"),
        (ModelSettings(precision="float16"), "is stored in float32"),
    ],
)
def test_what_the_version_can_not_do_is_told(tmp_path: Path, settings: ModelSettings, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        apply(settings, small_manifest(), tmp_path / "serving.toml")
