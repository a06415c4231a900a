"""One's own module: the example of docs/own-model.md."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.families import converter_for
from beamline.converters.own.steps import OwnSteps
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.text.tokenizer import TextTokenizer
from examples.own_module.model import TARGET_WORDS, Digits
from examples.own_module.train import train, write
from tests.support.compiled import compile_lowered, compile_version
from tests.support.engines import decode, make_engine, results, served_by
from tests.support.own_modules import convert
from tests.support.plain_search import plain_search, teacher_forced
from tests.support.ties import same_or_tie

MODEL = Path(__file__).parents[3] / "examples" / "own_module" / "model.py"
GREEDY = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=12)
BEAM = DecodingOptions(beam_size=4, num_hypotheses=4, max_length=12)


# -- the example -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for a moment: enough that its answers differ."""
    folder = tmp_path_factory.mktemp("own")
    write(train(steps=30), folder)
    assert convert(folder, f"{MODEL}:build") == 0
    return folder


def test_the_example_is_served_as_pytorch_computes_it(example: Path) -> None:
    version = example / "repository" / "own" / "1"
    parity = json.loads((version / "parity.json").read_text())
    assert (parity["beam_exact_share"], parity["text_exact_share"]) == (1.0, 1.0)
    converter = converter_for(
        Path(f"{MODEL}:build"),
        own=OwnFiles(example / "weights.safetensors", example / "source.json", example / "target.json"),
    )
    assert converter.family == "own"
    model = Digits().eval()
    model.load_state_dict(_weights(example))
    steps = OwnSteps(model)
    chance = random.Random(0)
    sources = [[chance.randrange(2, 12) for _ in range(length)] + [1] for length in (1, 2, 3, 5, 8, 13)]
    requests = [(source, options) for source in sources for options in (GREEDY, BEAM)]
    engine = make_engine(version, read_manifest(version), slots=5)
    with torch.no_grad():
        forced = [teacher_forced(lambda s, m, t: steps.score(s, m, t)[0], source) for source, _ in requests]
        expected = [plain_search(model, options, 2, 1) for model, (_, options) in zip(forced, requests, strict=True)]
    for answer, wanted in zip(results(decode(engine, requests, stagger=1)), expected, strict=True):
        for mine, other in zip(answer.hypotheses, wanted, strict=True):
            assert same_or_tie(mine.tokens, mine.token_log_probs, other.tokens, other.log_probs)
            if mine.tokens == other.tokens:
                np.testing.assert_allclose(mine.token_log_probs, other.log_probs, atol=1e-4)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "weights.safetensors")


def test_the_examples_alignments_come_from_its_attention(example: Path) -> None:
    version = example / "repository" / "own" / "1"
    engine = make_engine(version, read_manifest(version))
    options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=6, return_alignment=True)
    (answer,) = results(decode(engine, [([4, 5, 6, 1], options)]))
    rows = np.array(answer.hypotheses[0].alignment)
    np.testing.assert_allclose(rows.sum(1), 1, atol=1e-5)
    assert rows.std() > 0.01  # not spread evenly


def test_the_examples_graphs_compile_for_tensorrt(example: Path) -> None:
    assert set(compile_version(example / "repository" / "own" / "1", only="step")) == {"step"}


def test_the_example_on_an_emulated_gpu(example: Path) -> None:
    """Its step does not look at all that its encoder made: what nobody reads is no input of a plan."""
    version = example / "repository" / "own" / "1"
    manifest = read_manifest(version)
    requests = [([4, 5, 6, 1], GREEDY), ([7, 3, 1], BEAM)]
    expected = results(decode(make_engine(version, manifest), requests))
    with served_by("tensorrt"):
        engine = make_engine(version, manifest)
    for answer, wanted in zip(results(decode(engine, requests)), expected, strict=True):
        for mine, other in zip(answer.hypotheses, wanted.hypotheses, strict=True):
            assert same_or_tie(mine.tokens, mine.token_log_probs, other.tokens, other.token_log_probs)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
def test_the_example_compiles_in_every_precision(example: Path, precision: str, tmp_path: Path) -> None:
    compile_lowered(example / "repository" / "own" / "1", tmp_path / "lowered", precision)


@pytest.mark.full
def test_the_trained_example_spells(tmp_path: Path) -> None:
    write(train(), tmp_path)
    assert convert(tmp_path, f"{MODEL}:build") == 0
    version = tmp_path / "repository" / "own" / "1"
    assert set(compile_version(version)) == {"encoder", "step", "score"}  # for TensorRT
    source, target = (TextTokenizer.load(version / f"{side}_tokenizer.json") for side in ("source", "target"))
    engine = make_engine(version, read_manifest(version))
    (answer,) = results(decode(engine, [(source.encode("30519"), GREEDY)]))
    assert target.decode(answer.hypotheses[0].tokens) == "three zero five one nine"
    assert TARGET_WORDS[3] == "zero"
