"""The graphs of every shipped model, and of small models, compile for TensorRT without a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamline.converters.tensorrt.build import BuildFailure, Built
from beamline.converters.tensorrt.memory import needs
from beamline.converters.tensorrt.profiles import chosen_buckets, extents
from beamline.converters.tensorrt.targets import CAPABILITIES
from beamline.converters.tensorrt.version import graphs
from beamline.serving.contract.manifest import PooledManifest, read_any_manifest, read_manifest
from beamline.serving.models.repository import newest, scan
from tests.support.compiled import SLOTS, compile_lowered, compile_version
from tests.support.language_models import GPT2, ConvertedLanguageModel, convert_language_model
from tests.support.marian_shape import MarianShape
from tests.support.processes import ROOT, run_beamline

SHIPPED = scan(ROOT / "model_repo").models


def check_foreseen(folder: Path, found: dict[str, list[Built]]) -> None:
    """What `beamline build` says before it builds is half to twice of what plans then are and ask for."""
    manifest = read_any_manifest(folder)
    said = needs(graphs(folder, manifest, chosen_buckets(manifest, ())[:1]), manifest, extents(manifest, SLOTS))
    for need, (built,) in zip(said.plans, found.values(), strict=True):
        assert need.title.startswith(tuple(found))
        assert built.activation_bytes is not None
        assert 0.5 < need.plan / len(built.content) < 2, (need, len(built.content))
        assert 0.5 < need.activations / built.activation_bytes < 2, (need, built.activation_bytes)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_compiles(name: str) -> None:
    """One has weights of 8 bits, the other loops."""
    folder = newest(SHIPPED[name]).folder
    check_foreseen(folder, compile_version(folder))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [*CAPABILITIES, ",".join(CAPABILITIES)])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_compiles_everywhere(name: str, capability: str) -> None:
    """For one kind of GPU after the other, and as one plan for all of them."""
    for version in SHIPPED[name]:
        found = compile_version(version.folder, capabilities=[capability], all_buckets=True, slots=32)
        assert len(found["step"]) >= 2


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_shipped_checkpoint_compiles_in_few_bits(name: str, precision: str, tmp_path: Path) -> None:
    """From the portable form, weights behind DequantizeLinear: plans are smaller than those of full precision."""
    checkpoint = ROOT / "examples" / "translation" / "checkpoints" / name
    converted = run_beamline("convert", str(checkpoint), "--name", name, "--repo", str(tmp_path / "float32"))
    assert converted.returncode == 0, converted.stderr
    folder = tmp_path / "float32" / name / "1"
    if name == "en-de-gru":  # TensorRT can't: the model is refused with a sentence, before anything is built
        with pytest.raises(BuildFailure, match=r"its weights are int8(.|\n)*--precision float32, float16 or bfloat16"):
            compile_lowered(folder, tmp_path / precision, precision)
        return
    full, small = compile_version(folder), compile_lowered(folder, tmp_path / precision, precision)
    assert set(small) == set(full)
    for graph, (plan,) in small.items():
        assert plan.layers["DEQUANTIZE"] > 0
        assert len(plan.content) < 0.7 * len(full[graph][0].content)


def test_a_transformer_compiles(reference_version: Path) -> None:
    found = compile_version(reference_version)
    check_foreseen(reference_version, found)
    assert found["step"][0].layers["ATTENTION_INPUT"] == 2 * (len(read_manifest(reference_version).state) // 4)


def test_a_language_model_compiles(language_model: ConvertedLanguageModel) -> None:
    found = compile_version(language_model.folder)
    check_foreseen(language_model.folder, found)
    for name, attentions in (("prefill", 1), ("step", 2), ("score", 2)):
        layers = found[name][0].layers
        assert (layers["ATTENTION_INPUT"], layers["ROTARY_EMBEDDING"]) == (attentions, 2)
        assert ("KV_CACHE_UPDATE" in layers) == (name != "score")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
def test_a_language_model_compiles_in_every_precision(
    language_model: ConvertedLanguageModel, precision: str, tmp_path: Path
) -> None:
    found = compile_lowered(language_model.folder, tmp_path / "lowered", precision)
    assert set(found) == {"prefill", "step", "score"}


def test_a_classifier_compiles(pooled_repository: Path) -> None:
    folder = pooled_repository / "mood" / "1"
    found = compile_version(folder)
    check_foreseen(folder, found)
    (plan,) = found["pooled"]
    assert plan.layers["RECURRENCE"] > 0
    manifest = read_any_manifest(folder)
    assert isinstance(manifest, PooledManifest)
    assert {each.name for each in plan.outputs} == {"probabilities", *(f"vector_{how}" for how in manifest.poolings)}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_gpt2_compiles(tmp_path: Path) -> None:
    assert set(compile_version(convert_language_model(GPT2, tmp_path).folder)) == {"prefill", "step", "score"}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_marian_compiles_everywhere(renormalising_model: MarianShape, capability: str) -> None:
    """Two end tokens, and words that the graph itself forbids."""
    compile_version(renormalising_model.folder, renormalising_model.manifest, [capability], all_buckets=True, slots=32)
