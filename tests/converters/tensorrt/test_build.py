"""Plans and their cards: what is built, what is current, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from beamline.converters.tensorrt import lint
from beamline.converters.tensorrt.build import BuildFailure
from beamline.converters.tensorrt.graph import load
from beamline.converters.tensorrt.library import Library, find_library
from beamline.converters.tensorrt.profiles import chosen_buckets, default_buckets, extents, profile, worst_case
from beamline.converters.tensorrt.version import (
    Outcome,
    Wanted,
    build_version,
    for_one_plan,
    planned,
)
from beamline.serving.backends.selection import look
from beamline.serving.cli import main
from beamline.serving.commands.doctor import report
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.tensorrt_plans import (
    ENGINES,
    PlanCard,
    foreign,
    plan_path,
    read_cards,
    stale,
    usable_plans,
)
from beamline.serving.errors import ConversionError, ModelError
from tests.support.marian_shape import MarianShape

CAPABILITY = "86"
GPUS = ("80", CAPABILITY)  # that one plan serves


@pytest.fixture(scope="module")
def library() -> Library:
    return find_library("tensorrt_rtx")


@pytest.fixture(scope="module")
def version(
    plain_model: MarianShape, library: Library, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Manifest, list[Outcome]]:
    """The small Marian with plans in one bucket."""
    folder = tmp_path_factory.mktemp("planned")
    shutil.copytree(plain_model.folder, folder, dirs_exist_ok=True)
    outcomes: list[Outcome] = []
    wanted = Wanted(GPUS, (worst_case(plain_model.manifest),), slots=8)
    build_version(folder, plain_model.manifest, library, wanted, outcomes.append)
    return folder, plain_model.manifest, outcomes


def card_of(version: tuple[Path, Manifest, list[Outcome]], graph: str) -> PlanCard:
    return next(outcome.card for outcome in version[2] if outcome.card.graph == graph)


def test_every_graph_becomes_a_plan_with_a_card(version: tuple[Path, Manifest, list[Outcome]]) -> None:
    folder, manifest, outcomes = version
    assert {outcome.card.graph for outcome in outcomes} == {name for name, file in manifest.graphs if file}
    assert [outcome.card for outcome in outcomes if outcome.note != "new"] == []
    assert sorted(read_cards(folder), key=lambda card: card.graph) == sorted(
        (outcome.card for outcome in outcomes), key=lambda card: card.graph
    )
    for outcome in outcomes:
        assert plan_path(folder, outcome.card).stat().st_size == outcome.card.plan_bytes > 10_000


def test_one_plan_serves_several_kinds_of_gpus(
    version: tuple[Path, Manifest, list[Outcome]], library: Library, tmp_path: Path
) -> None:
    """And takes the place of one that serves fewer of them."""
    folder = Path(shutil.copytree(version[0], tmp_path / "version"))
    manifest, (step, *_) = version[1], [outcome.card for outcome in version[2] if outcome.card.graph == "step"]
    assert step.plan.file.endswith("-sm80-86.tensorrt_rtx.plan")
    for capability in GPUS:
        usable_plans(folder, manifest, step.module, step.module_version, capability)
    fewer = step.model_copy(update={"capability": "80", "plan": step.plan.model_copy(update={"file": "old.plan"})})
    (folder / ENGINES / "old.json").write_text(fewer.model_dump_json())
    (folder / ENGINES / "old.plan").write_bytes(b"")
    wanted = Wanted(GPUS, (worst_case(manifest),), slots=8)
    build_version(folder, manifest, library, wanted, lambda outcome: None)
    assert not list((folder / ENGINES).glob("old.*"))
    assert len(read_cards(folder)) == len(version[2])
    assert for_one_plan(GPUS, Library("tensorrt", library.module)) == ["80", "86"]


def test_what_a_gpu_will_need_is_known_before(version: tuple[Path, Manifest, list[Outcome]]) -> None:
    """About: half to twice of what TensorRT says when it has built them."""
    folder, manifest, outcomes = version
    found = planned(folder, manifest, Wanted(GPUS, (worst_case(manifest),), slots=8))
    said = max(outcome.card.activation_bytes or 0 for outcome in outcomes)
    assert 0.5 * said < found.activations < 2 * said
    assert len(found.plans) == len(outcomes)
    assert all(plan.plan > 2**20 for plan in found.plans)
    cache = next(tensor for tensor in manifest.state if tensor.kind == "cache").shape
    one = 8 * int(cache[1]) * worst_case(manifest) * int(cache[3]) * 4
    assert found.arenas > len([each for each in manifest.state if each.kind == "cache"]) * one
    *plans, together = found.lines()
    assert [line.split(":")[0] for line in plans] == [_title(outcome.card) for outcome in outcomes]
    assert together.startswith("all of it on a GPU: ")


def _title(card: PlanCard) -> str:
    return card.title.split(", compute")[0]


def test_a_step_keeps_its_caches_in_place(version: tuple[Path, Manifest, list[Outcome]]) -> None:
    card = card_of(version, "step")
    caches = [tensor for tensor in version[1].state if tensor.kind == "cache"]
    assert card.aliases == {tensor.output: tensor.name for tensor in caches}
    assert card.layers["KV_CACHE_UPDATE"] == len(caches) == 4
    assert card.layers["ATTENTION_INPUT"] == 4  # two layers, self and cross
    assert card.layers["TOPK"] == 5  # three of the search, one of sampling, one of the alternatives
    axes = {tensor.name: tensor.axes for tensor in card.inputs}
    assert axes["cache_key_0"][2] == "C"
    assert card.profile["cache_key_0"].smallest[2] == card.profile["cache_key_0"].largest[2] == card.cache_length
    assert axes["tokens"] == ("B", "K")


def test_what_is_current_is_not_built_again(
    version: tuple[Path, Manifest, list[Outcome]], library: Library, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(version[0], folder)
    manifest = version[1]
    wanted = Wanted(GPUS, (worst_case(manifest),), slots=8)
    again: list[Outcome] = []
    build_version(folder, manifest, library, wanted, again.append)
    assert {outcome.note for outcome in again} == {"current"}
    # One plan is damaged, and that one alone is built again.
    plan = plan_path(folder, card_of(version, "encoder"))
    plan.write_bytes(plan.read_bytes()[:-1])
    again.clear()
    build_version(folder, manifest, library, wanted, again.append)
    assert [outcome.card.graph for outcome in again if outcome.note != "current"] == ["encoder"]
    assert "corrupt" in next(outcome.note for outcome in again if outcome.card.graph == "encoder")


def test_a_stale_or_foreign_plan_is_built_again(
    version: tuple[Path, Manifest, list[Outcome]], library: Library, tmp_path: Path
) -> None:
    """One graph has changed, and the plan of another is of another release: those two, and no other."""
    folder = Path(shutil.copytree(version[0], tmp_path / "version"))
    old, wanted = version[1], Wanted(GPUS, (worst_case(version[1]),), slots=8)
    model = onnx.load(folder / "encoder.onnx", load_external_data=False)
    model.doc_string = "changed"
    onnx.save(model, folder / "encoder.onnx")
    assert old.graphs.encoder is not None
    changed = old.graphs.encoder.model_copy(
        update={"sha256": hashlib.sha256((folder / "encoder.onnx").read_bytes()).hexdigest()}
    )
    manifest = old.model_copy(update={"graphs": old.graphs.model_copy(update={"encoder": changed})})
    step = card_of(version, "step")
    path = (folder / ENGINES / step.plan.file).with_suffix(".json")
    path.write_text(step.model_copy(update={"module_version": "1.6"}).model_dump_json())
    with pytest.raises(ModelError, match=r"no TensorRT plan of (step|encoder), (step|encoder)"):
        usable_plans(folder, manifest, step.module, step.module_version, CAPABILITY)

    outcomes: list[Outcome] = []
    build_version(folder, manifest, library, wanted, outcomes.append)
    assert {outcome.card.graph: outcome.note for outcome in outcomes if outcome.note != "current"} == {
        "encoder": "encoder.onnx has changed since it was built",
        "step": f"it was built by tensorrt_rtx 1.6, and this machine runs {step.module_version}",
    }
    for capability in GPUS:
        usable_plans(folder, manifest, step.module, step.module_version, capability)
    assert len(read_cards(folder)) == len(version[2])


def test_float32_means_float32(
    version: tuple[Path, Manifest, list[Outcome]],
    library: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorRT rounds to TF32 unless it is told not to; plans that were built so, before cards said it, are stale."""
    trt = library.module
    seen, really = [], trt.Builder.build_serialized_network

    def watched(builder: Any, network: Any, config: Any) -> Any:
        seen.append(config.get_flag(trt.BuilderFlag.TF32))
        return really(builder, network, config)

    monkeypatch.setattr(trt.Builder, "build_serialized_network", watched)
    folder = Path(shutil.copytree(version[0], tmp_path / "version"))
    manifest, card = version[1], card_of(version, "encoder")
    path = (folder / ENGINES / card.plan.file).with_suffix(".json")
    path.write_text(card.model_dump_json(exclude={"tf32"}))
    with pytest.raises(ModelError, match=r"no TensorRT plan of encoder(.|\n)*rounds float32 to TF32"):
        usable_plans(folder, manifest, card.module, card.module_version, CAPABILITY)
    outcomes: list[Outcome] = []
    wanted = Wanted(GPUS, (worst_case(manifest),), slots=8)
    build_version(folder, manifest, library, wanted, outcomes.append)
    assert [outcome.card.graph for outcome in outcomes if outcome.note != "current"] == ["encoder"]
    assert seen == [False]
    usable_plans(folder, manifest, card.module, card.module_version, CAPABILITY)


def test_a_version_with_one_graph_that_can_not_be_built_is_refused_before_the_first_plan(
    plain_model: MarianShape, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes minutes; the last graph's problem is known at once."""
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / "version"))
    monkeypatch.setattr(lint, "problems", lambda graph: ["GRU g: no"] if graph.name == "score" else [])
    wanted = Wanted((CAPABILITY,), (worst_case(plain_model.manifest),), slots=8)
    with pytest.raises(BuildFailure, match=r"score\.onnx can't be built for TensorRT:\n  - GRU g: no"):
        build_version(folder, plain_model.manifest, library, wanted, lambda outcome: pytest.fail("a plan was built"))
    assert not (folder / ENGINES).exists()


def test_a_stale_plan_is_not_run(version: tuple[Path, Manifest, list[Outcome]]) -> None:
    folder, manifest, _ = version
    graphs = manifest.graphs.model_copy(update={"step": manifest.graphs.step.model_copy(update={"sha256": "other"})})
    changed = manifest.model_copy(update={"graphs": graphs})
    assert "has changed" in str(stale(card_of(version, "step"), changed))
    with pytest.raises(ModelError, match=r"no TensorRT plan of step(.|\n)*step\.onnx has changed"):
        usable_plans(folder, changed, "tensorrt_rtx", card_of(version, "step").module_version, CAPABILITY)


def test_the_doctor_knows_stale_plans(version: tuple[Path, Manifest, list[Outcome]], tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    shutil.copytree(version[0], folder)
    assert report(look(), tmp_path)[-1] == "m/1: tensorrt_rtx for 80, 86"
    weights = version[1].weights.model_copy(update={"sha256": "other"})
    (folder / "manifest.json").write_text(version[1].model_copy(update={"weights": weights}).to_json())
    stale_line = "m/1: tensorrt_rtx for 80, 86; 3 of 3 plans are stale: beamline build m/1"
    assert report(look(), tmp_path)[-1] == stale_line


def test_a_foreign_plan_is_not_run(version: tuple[Path, Manifest, list[Outcome]]) -> None:
    folder, manifest, _ = version
    card = card_of(version, "step")
    usable = usable_plans(folder, manifest, card.module, card.module_version, CAPABILITY)
    assert usable.cache_buckets == (worst_case(manifest),)
    assert usable.max_slots == 8
    for here, sentence in (
        (("tensorrt", "11.4", CAPABILITY), "runs tensorrt"),
        ((card.module, "9.9", CAPABILITY), "runs 9.9"),
        ((card.module, card.module_version, "89"), "this GPU has 89"),
    ):
        assert sentence in str(foreign(card, *here))
        with pytest.raises(ModelError, match="beamline build"):
            usable_plans(folder, manifest, *here)


def test_buckets_are_few_and_end_with_the_worst_case(plain_model: MarianShape) -> None:
    manifest = plain_model.manifest
    limit = worst_case(manifest)
    assert default_buckets(manifest)[-1] == limit
    assert len(default_buckets(manifest)) <= 5
    assert chosen_buckets(manifest, [32, 9999]) == (32, limit)
    with pytest.raises(ConversionError, match="no room for one step"):
        chosen_buckets(manifest, [1])
    assert extents(manifest, 4)["B"].largest == 4


@pytest.mark.parametrize(
    ("words", "length", "rows", "longest"),
    [
        (8000, 256, 4, 256),  # the shipped model
        (58101, 512, 4, 512),  # Marian-base
        (49152, 8192, 1, 5461),  # SmolLM2
        (128256, 131072, 1, 2092),  # Llama 3
    ],
)
def test_a_score_plan_asks_for_no_more_memory_than_a_gpu_has(
    plain_model: MarianShape, words: int, length: int, rows: int, longest: int
) -> None:
    """It is [rows, length, words] in float32, at the profile's largest: 1 GiB at most."""
    manifest = plain_model.manifest
    manifest = manifest.model_copy(
        update={
            "vocabulary": manifest.vocabulary.model_copy(update={"target_size": words}),
            "limits": manifest.limits.model_copy(update={"max_target_length": length}),
        }
    )
    score = profile(load("score", plain_model.folder / "score.onnx"), extents(manifest, 32))
    assert score["target"].largest == score["labels"].largest == (rows, longest)
    assert score["source"].largest[0] == rows
    assert 4 * rows * longest * words <= 2**30
    few = profile(load("score", plain_model.folder / "score.onnx"), extents(manifest, 2))
    assert few["target"].largest[0] == min(rows, 2)


def test_a_capability_that_is_not_known_is_refused(
    library: Library, version: tuple[Path, Manifest, list[Outcome]]
) -> None:
    with pytest.raises(ConversionError, match="it can for"):
        build_version(version[0], version[1], library, Wanted(("90",), rebuild=True), lambda outcome: None)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--compute-capability", "90"], "can't build for compute capability 90; it can for 75, 80, 86"),
        (["--plan-slots", "0"], "--plan-slots 0: a plan holds at least one request"),
        (["--buckets", "64,many"], "--buckets '64,many': cache lengths such as 64,256 are expected"),
        (["--library", "tensorrt"], "and tensorrt can't be loaded"),
    ],
)
def test_what_can_not_be_built_is_refused_before_anything_is_done(
    wrong: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion takes minutes, and nothing of one has begun."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    convert = ["convert", "nowhere", "--name", "m", "--repo", str(tmp_path), "--target", "tensorrt"]
    assert main([*convert, *wrong]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_engines_folder_is_no_model(version: tuple[Path, Manifest, list[Outcome]]) -> None:
    assert {path.suffix for path in (version[0] / ENGINES).iterdir()} == {".plan", ".json"}
