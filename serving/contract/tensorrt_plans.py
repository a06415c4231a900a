"""The TensorRT plans of a model version: `engines/<graph>[-c<bucket>]-sm<capability>.<module>.plan`, each with a card.

A plan is opaque: nothing in it says which graph it was made from. Its card does, so a plan that is stale (its graph has
changed, or the way in which we build) or foreign (made by another release, or for another GPU) is refused with a
sentence instead of giving wrong numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from beamline.serving.contract.files import open_regular, read_text
from beamline.serving.contract.manifest import AnyManifest, File, Record
from beamline.serving.errors import ModelError

ENGINES = "engines"
CARD_FORMAT = 1


class PlanTensor(Record):
    name: str
    dtype: str  # numpy's name, or bfloat16
    axes: tuple[int | str, ...]  # as in the portable graph: sizes, names, or multiples of one (2*K)


class ShapeRange(Record):
    """What one input may look like at run time."""

    smallest: tuple[int, ...]
    usual: tuple[int, ...]  # what the plan is tuned for
    largest: tuple[int, ...]

    def holds(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.smallest) and all(
            low <= size <= high for low, size, high in zip(self.smallest, shape, self.largest, strict=True)
        )


class PlanCard(Record):
    """All that is known of a plan without the GPU it was made for."""

    format_version: int = CARD_FORMAT
    graph: str  # encoder, step, score, prefill, pooled
    graph_sha256: str
    weights_sha256: str
    module: str  # tensorrt or tensorrt_rtx
    module_version: str
    capability: str  # "86"; or of a plan that several kinds of GPUs run, "80,86"
    cache_length: int | None  # the bucket; None where the graph has no cache
    max_slots: int
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    profile: dict[str, ShapeRange]
    aliases: dict[str, str]  # an output that must be bound where this input is
    plan: File
    plan_bytes: int
    build_seconds: float
    activation_bytes: int | None = None  # what the builder says an execution needs beside arenas and weights
    layers: dict[str, int] = Field(default_factory=dict)
    tf32: bool = True  # whether float32 may be rounded to TF32; in plans whose cards do not say so, it is

    @property
    def key(self) -> tuple[str, int | None]:
        return self.graph, self.cache_length

    @property
    def capabilities(self) -> tuple[str, ...]:
        return tuple(self.capability.split(","))

    def most(self, axis: str) -> int:
        """The largest size of an axis that an input has by this name."""
        return next(self.profile[each.name].largest[each.axes.index(axis)] for each in self.inputs if axis in each.axes)

    @property
    def title(self) -> str:
        bucket = "" if self.cache_length is None else f", cache {self.cache_length}"
        return f"{self.graph}{bucket}, compute capability {', '.join(self.capabilities)}"


def plan_stem(graph: str, cache_length: int | None, capability: str, module: str) -> str:
    bucket = "" if cache_length is None else f"-c{cache_length}"
    return f"{graph}{bucket}-sm{capability.replace(',', '-')}.{module}"


def stale(card: PlanCard, manifest: AnyManifest) -> str | None:
    """Why the plan is not what would be built of this version now; None where it is."""
    graphs: Mapping[str, File | None] = dict(manifest.graphs)
    graph = graphs.get(card.graph)
    if graph is None:
        return f"the version has no {card.graph} graph any more"
    if graph.sha256 != card.graph_sha256:
        return f"{graph.file} has changed since it was built"
    if manifest.weights.sha256 != card.weights_sha256:
        return f"{manifest.weights.file} has changed since it was built"
    if card.tf32:
        return "it was built by an earlier release, and rounds float32 to TF32"
    return None


def foreign(card: PlanCard, module: str, module_version: str, capability: str) -> str | None:
    """Why this machine can't run the plan; None where it can."""
    if card.module != module:
        return f"it was built by {card.module}, and this machine runs {module}"
    if card.module_version != module_version:
        return f"it was built by {module} {card.module_version}, and this machine runs {module_version}"
    if capability not in card.capabilities:
        return f"it was built for compute capability {', '.join(card.capabilities)}, and this GPU has {capability}"
    return None


def read_card(path: Path) -> PlanCard:
    try:
        card = PlanCard.model_validate_json(read_text(path))
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except ValidationError as error:
        raise ModelError(f"{path} is not the card of a plan: {error.error_count()} fields are wrong") from error
    if card.format_version != CARD_FORMAT:
        raise ModelError(f"{path} has format version {card.format_version}; this release reads {CARD_FORMAT}")
    return card


def read_cards(folder: Path) -> list[PlanCard]:
    """Of a version folder; sorted by file name."""
    engines = folder / ENGINES
    return [read_card(path) for path in sorted(engines.glob("*.json"))] if engines.is_dir() else []


def plan_path(folder: Path, card: PlanCard) -> Path:
    """Of a plan whose content is what its card says."""
    path = folder / ENGINES / card.plan.file
    if "/" in card.plan.file or not path.is_file():
        raise ModelError(f"{path} does not exist, but its card does: run `beamline build` again")
    with open_regular(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != card.plan.sha256:
            raise ModelError(f"{path} is corrupt: its sha256 is not its card's; run `beamline build --rebuild`")
    return path


def how_to_build(model: str, module: str, capability: str, alone: str = "") -> str:
    """The command for plans that this module runs on such a GPU, wherever it is called: another library may be there,
    too. `alone` makes a GPU the first one: `tensorrt` builds for no other."""
    before = alone if module == "tensorrt" else ""
    return f"{before}beamline build {model} --compute-capability {capability} --library {module}"


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of one version that this machine runs."""

    cards: Mapping[tuple[str, int | None], PlanCard]
    cache_buckets: tuple[int, ...]
    max_slots: int


def usable_plans(
    folder: Path, manifest: AnyManifest, module: str, module_version: str, capability: str, alone: str = ""
) -> Plans:
    """Every graph's, in every bucket; or a `ModelError` that says what is missing, why the others don't serve, and how
    to build it (`how_to_build`)."""
    usable: dict[tuple[str, int | None], PlanCard] = {}
    refused: list[str] = []
    for card in read_cards(folder):
        reason = stale(card, manifest) or foreign(card, module, module_version, capability)
        if reason is None:
            usable[card.key] = card
        else:
            refused.append(f"{card.plan.file}: {reason}")
    wanted = [name for name, file in manifest.graphs if file is not None]
    missing = [name for name in wanted if not any(graph == name for graph, _ in usable)]
    buckets = tuple(sorted(length for graph, length in usable if graph == "step" and length is not None))
    for graph in {graph for graph, length in usable if length is not None}:
        lacking = sorted(set(buckets) - {length for name, length in usable if name == graph and length is not None})
        missing += [f"{graph} with cache length {length}" for length in lacking]
    if missing:
        reasons = "".join(f"\n  - {reason}" for reason in refused)
        advice = how_to_build(manifest.name, module, capability, alone)
        raise ModelError(f"{folder} has no TensorRT plan of {', '.join(missing)} for this GPU: run `{advice}`{reasons}")
    return Plans(usable, buckets, min(card.max_slots for card in usable.values()))
