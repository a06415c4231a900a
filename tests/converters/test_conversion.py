"""A checkpoint becomes a version: complete and proved, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import Tensor
from torch.export import ExportedProgram

from beamline.converters.conversion import STEPS
from beamline.converters.families import converter_for
from beamline.converters.families.reference_transformer import ReferenceTransformerConverter
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.contract.tensorrt_plans import read_cards
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import ConversionError, ParityFailure
from beamline.serving.models.repository import scan, verify
from beamline.version import beamline_version
from tests.support.checkpoints import (
    EOS,
    TorchShape,
    torch_model,
    write_reference,
    write_torch_transformer,
)
from tests.support.compiled import compile_version
from tests.support.engines import decode, make_engine, results
from tests.support.pairwise import Case, covering
from tests.support.processes import run_beamline

T = TypeVar("T")


def check_exact(folder: Path) -> None:
    """Its certificate says so, every file is what the manifest says, and it decodes."""
    parity = json.loads((folder / "parity.json").read_text())
    assert parity["beam_exact_share"] == 1.0
    assert parity["text_exact_share"] == 1.0
    assert parity["max_log_prob_difference"] <= 1e-3
    assert parity["beams_compared"] >= 40
    assert parity["lines_compared"] >= 2000
    assert parity["ties"] <= 2
    assert parity["created_with"]["torch"]
    manifest = read_manifest(folder)
    assert parity["longest_compared"] == min(512, manifest.limits.max_source_length)
    verify(folder, manifest)
    engine = make_engine(folder, manifest, slots=2)
    options = DecodingOptions(beam_size=3, num_hypotheses=2, max_length=10)
    (found,) = results(decode(engine, [((5, 6, 7, EOS), options)]))
    assert len(found.hypotheses) == 2


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.is_dir() else []


def test_a_reference_checkpoint(reference_version: Path) -> None:
    check_exact(reference_version)
    manifest = read_manifest(reference_version)
    assert (manifest.family, manifest.source_languages) == ("transformer", ("en",))
    assert contents(reference_version) == [
        "encoder.onnx",
        "manifest.json",
        "parity.json",
        "score.onnx",
        "step.onnx",
        "tokenizer.json",
        "weights.bin",
    ]


def convert_torch(shape: TorchShape, folder: Path) -> None:
    source = write_torch_transformer(folder / "source", torch_model(shape))
    steps: list[str] = []
    checks: dict[str, int] = {}

    def each(what: str, items: Sequence[T]) -> Iterator[T]:
        for item in items:
            checks[what] = checks.get(what, 0) + 1
            yield item

    repository = folder / "repository"
    manifest, certificate = converter_for(source).convert("theirs", repository, advance=steps.append, each=each)
    assert manifest.family == "torch_transformer"
    assert certificate.problems() == []
    assert tuple(steps) == STEPS
    # Of each check, whoever waits can see what it goes through: requests, one by one, and lines.
    assert checks["beam width 4"] == checks["scores"] == checks["beam width 1"] > 4
    assert (checks["the longest sequence"], checks["ids and text"]) == (1, certificate.lines_compared)
    check_exact(folder / "repository" / "theirs" / "1")


def test_a_torch_transformer(tmp_path: Path, traced_again: list[ExportedProgram]) -> None:
    """What the reference above is not: post-norm, learned positions, nothing shared, a bias, another activation."""
    shape = TorchShape(
        norm_first=False, activation="gelu", positions="learned", shared=False, tied=False, output_bias=True
    )
    convert_torch(shape, tmp_path)
    assert traced_again == []  # which would take half as long again


def test_a_marian_directory(model_repository: Path) -> None:
    """Converted by the command, in a process of its own."""
    check_exact(model_repository / "tiny" / "1")
    manifest = read_manifest(model_repository / "tiny" / "1")
    assert manifest.family == "marian"
    assert manifest.tokenizers.source != manifest.tokenizers.target


POSITIONS = ("sinusoidal", "sinusoidal_halves", "learned")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("values", covering((False, True), ("relu", "gelu"), POSITIONS, (True, False), (True, False)))
def test_torch_transformers(tmp_path: Path, values: Case) -> None:
    """Numerically, the whole grid is compared without exporting, in families/test_transformers.py."""
    convert_torch(TorchShape(*values), tmp_path)
    compile_version(tmp_path / "repository" / "theirs" / "1")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("norm", "positions", "tie", "activation"),
    covering(("pre", "post"), POSITIONS, (True, False), ("relu", "gelu", "silu")),
)
def test_reference_checkpoints(tmp_path: Path, norm: str, positions: str, tie: bool, activation: str) -> None:
    source = write_reference(
        tmp_path / "source",
        norm=norm,
        positions=positions,
        share_embeddings=tie,
        tie_output=tie,
        output_bias=not tie,
        activation=activation,
        final_norm=norm == "pre",
        encoder_layers=2,
        decoder_layers=3,
    )
    converter_for(source).convert("reference", tmp_path / "repository")
    check_exact(tmp_path / "repository" / "reference" / "1")
    compile_version(tmp_path / "repository" / "reference" / "1")


# -- without exporting again -----------------------------------------------------------------------------------------


class Perturbed(ReferenceTransformerConverter):
    """As if the export had changed the model."""

    def load(self) -> LoadedModel:
        loaded = super().load()

        def original(source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
            logits = loaded.original(source, source_mask, target)
            return logits.roll(1, dims=-1)

        return replace(loaded, original=original)


class Forgetful(ReferenceTransformerConverter):
    """As if the export were wrong at the model's limit only, where short comparisons never get."""

    def load(self) -> LoadedModel:
        loaded = super().load()

        def original(source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
            logits = loaded.original(source, source_mask, target)
            return logits.roll(1, dims=-1) if source.shape[1] == loaded.limits.max_source_length else logits

        return replace(loaded, original=original)


class Renamed(ReferenceTransformerConverter):
    """As if the tokenizer's conversion had changed its ids."""

    def load(self) -> LoadedModel:
        loaded = super().load()
        text = loaded.source_tokenizer

        class Other(type(text)):  # type: ignore[misc]
            def encode(self, line: str) -> list[int]:
                return [*text.encode(line), 7]

        text_class: Any = Other
        other = text_class.__new__(text_class)
        other.__dict__.update(text.__dict__)
        return replace(loaded, source_tokenizer=other, target_tokenizer=other)


@pytest.mark.usefixtures("copied_graphs")
@pytest.mark.parametrize("existing", [False, True], ids=["a new model", "beside an older version"])
def test_a_parity_failure_leaves_nothing(reference_source: Path, tmp_path: Path, existing: bool) -> None:
    if existing:
        converter_for(reference_source).convert("de", tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ParityFailure) as caught:
        Perturbed(reference_source).convert("de", tmp_path)
    message = str(caught.value)
    assert message.startswith("the exported model is not the one that was brought: log-probabilities differ by up to ")
    assert "of the beams are identical" in message
    assert "largest log-probability difference" in message  # the table
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("copied_graphs")
def test_an_error_at_the_limit_is_a_parity_failure(reference_source: Path, tmp_path: Path) -> None:
    with pytest.raises(ParityFailure, match="log-probabilities differ by up to "):
        Forgetful(reference_source).convert("de", tmp_path)
    assert contents(tmp_path) == []


@pytest.mark.usefixtures("copied_graphs")
def test_other_ids_are_a_parity_failure(reference_source: Path, tmp_path: Path) -> None:
    with pytest.raises(ParityFailure, match=r"only 0\.00% of the lines have identical ids and text"):
        Renamed(reference_source).convert("de", tmp_path)
    assert contents(tmp_path) == []


def interrupted_at(step: str) -> Callable[[str], None]:
    def advance(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    return advance


@pytest.mark.usefixtures("quick_conversion")
@pytest.mark.parametrize("step", STEPS)
def test_an_interruption_leaves_nothing(reference_source: Path, tmp_path: Path, step: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        converter_for(reference_source).convert("de", tmp_path, advance=interrupted_at(step))
    assert contents(tmp_path) == []


@pytest.mark.usefixtures("quick_conversion")
@pytest.mark.parametrize("step", [*STEPS[2:], "rename"])
def test_what_a_kill_leaves_is_no_model_and_is_swept(
    reference_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A killed process cleans up nothing. Its staging folder belongs to a process that is gone."""
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        killed.setattr(os, "getpid", lambda: 2**31 - 2)
        if step == "rename":
            killed.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            converter_for(reference_source).convert("de", tmp_path, advance=interrupted_at(step))
    assert [path.name for path in (tmp_path / "de").iterdir()] == [f".staging-{2**31 - 2}"]
    assert scan(tmp_path).models == {}
    converter_for(reference_source).convert("de", tmp_path)
    assert [path.name for path in (tmp_path / "de").iterdir()] == ["1"]


@pytest.mark.usefixtures("quick_conversion")
def test_a_staging_folder_of_ones_own_number_is_swept(reference_source: Path, tmp_path: Path) -> None:
    """In a container, every conversion may be process 7."""
    (tmp_path / "de" / f".staging-{os.getpid()}" / "inside").mkdir(parents=True)
    converter_for(reference_source).convert("de", tmp_path)
    assert [path.name for path in (tmp_path / "de").iterdir()] == ["1"]


@pytest.mark.usefixtures("quick_conversion")
def test_the_staging_folder_of_a_running_conversion_is_left_alone(reference_source: Path, tmp_path: Path) -> None:
    other = tmp_path / "de" / f".staging-{os.getppid()}"
    other.mkdir(parents=True)
    converter_for(reference_source).convert("de", tmp_path)
    assert sorted(path.name for path in (tmp_path / "de").iterdir()) == [other.name, "1"]


# -- names and versions ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_conversion")
def test_versions_are_counted_on(reference_source: Path, tmp_path: Path) -> None:
    converter = converter_for(reference_source)
    made = [converter.convert("de", tmp_path, version)[0].version for version in (None, None, 7, None, 3)]
    assert made == [1, 2, 7, 8, 3]
    assert [version.version for version in scan(tmp_path).models["de"]] == [1, 2, 3, 7, 8]
    with pytest.raises(ConversionError, match=r"de/7 already exists; choose another --version"):
        converter.convert("de", tmp_path, 7)
    with pytest.raises(ConversionError, match="a version is a whole number from 1 on, not 0"):
        converter.convert("de", tmp_path, 0)
    for inside in ("de", "de/1"):  # what is no version would be a problem of the repository
        with pytest.raises(ConversionError, match=f"a folder of the model de: give --repo {tmp_path}$"):
            converter.convert("other", tmp_path / inside)
    assert sorted(path.name for path in (tmp_path / "de").iterdir()) == ["1", "2", "3", "7", "8"]


@pytest.mark.usefixtures("quick_conversion")
def test_the_certificate_says_which_versions_made_it(reference_source: Path, tmp_path: Path) -> None:
    converter_for(reference_source).convert("de", tmp_path)
    recorded = json.loads((tmp_path / "de/1/parity.json").read_text())["created_with"]
    assert recorded["beamline"] == beamline_version() != "unknown"
    assert recorded["torch"].startswith("2.")


@pytest.mark.parametrize("name", ["", ".hidden", "../de", "a/b", "a b", "-x", "ä", "x" * 101, "a\n"])
def test_a_name_that_no_folder_should_have(reference_source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConversionError, match="can't be a model's name"):
        converter_for(reference_source).convert(name, tmp_path / "repository")
    assert contents(tmp_path) == []


@pytest.mark.full
def test_int8_is_asked_for_on_the_command_line(marian_directory: Path, tmp_path: Path) -> None:
    """With plans of it."""
    small = ["--name", "small", "--repo", str(tmp_path), "--precision", "int8"]
    plans = ["--target", "tensorrt", "--compute-capability", "86", "--buckets", "64", "--plan-slots", "8"]
    converted = run_beamline("convert", str(marian_directory), *small, *plans)
    assert converted.returncode == 0, converted.stderr
    assert "int8, mean difference to float32" in converted.stdout
    assert {"verify ...", "verify: beam width 4 ...", "verify: int8 beside float32 ..."} <= set(
        converted.stderr.splitlines()
    )
    assert "sacremoses" not in converted.stderr
    folder = tmp_path / "small" / "1"
    manifest = read_manifest(folder)
    assert manifest.precision == "int8"
    verify(folder, manifest)
    loss = json.loads((folder / "parity.json").read_text())["lowered"]
    assert 0 < loss["mean_log_prob_difference"] < loss["max_log_prob_difference"]
    assert [path.name for path in folder.iterdir() if path.name.startswith("weights")] == ["weights.bin"]
    cards = read_cards(folder)
    assert {(card.graph, card.capability) for card in cards} == {(name, "86") for name in ("encoder", "step", "score")}
    assert all(card.layers["DEQUANTIZE"] > 0 for card in cards)
    assert len([card for card in cards if card.graph == "step"]) == 2  # the bucket, and the worst case
    built = run_beamline("build", "small", "--repo", str(tmp_path), *plans[2:])
    assert (built.returncode, built.stdout.count("current")) == (0, 4), built.stderr
