"""All plans of a model version: every graph, every bucket, every GPU. What is current already is not built again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from beamline.converters.tensorrt import timing_cache
from beamline.converters.tensorrt.build import CURRENT, build, refuse_unbuildable, save
from beamline.converters.tensorrt.graph import Graph, load
from beamline.converters.tensorrt.library import Library
from beamline.converters.tensorrt.memory import Needs, needs
from beamline.converters.tensorrt.profiles import Extent, chosen_buckets, extents
from beamline.serving.contract.manifest import AnyManifest
from beamline.serving.contract.tensorrt_plans import ENGINES, PlanCard, foreign, plan_path, plan_stem, read_card, stale
from beamline.serving.errors import ModelError


@dataclass(frozen=True)
class Wanted:
    capabilities: tuple[str, ...]
    buckets: tuple[int, ...] = ()  # none: few, up to the worst case
    slots: int = 32
    rebuild: bool = False
    gpu: str = ""  # the name of the one that is there


@dataclass(frozen=True)
class Outcome:
    card: PlanCard
    note: str  # why it was built, or that it is current


def build_version(
    folder: Path, manifest: AnyManifest, library: Library, wanted: Wanted, report: Callable[[Outcome], None]
) -> list[PlanCard]:
    """Raises at the first plan that can't be built; those before it stay, and are not built again."""
    sizes = extents(manifest, wanted.slots)
    wanted_graphs = list(graphs(folder, manifest, chosen_buckets(manifest, wanted.buckets)))
    for graph in wanted_graphs:  # a plan takes minutes: what can't be is refused before the first
        refuse_unbuildable(graph)
    cards = []
    for graph in wanted_graphs:
        for capability in for_one_plan(wanted.capabilities, library):
            outcome = _one(graph, folder, manifest, library, capability, sizes, wanted)
            report(outcome)
            cards.append(outcome.card)
    _remove_strays(folder / ENGINES, manifest)
    timing_cache.remove_others(folder / ENGINES, library)
    return cards


def for_one_plan(capabilities: Sequence[str], library: Library) -> list[str]:
    """What tensorrt-rtx builds is finished by the GPU's driver, so one plan serves several kinds of GPUs, and is hardly
    larger than for one."""
    return [",".join(capabilities)] if library.ahead_of_time else list(capabilities)


def planned(folder: Path, manifest: AnyManifest, wanted: Wanted) -> Needs:
    """What all of them will need of a GPU, about."""
    found = graphs(folder, manifest, chosen_buckets(manifest, wanted.buckets))
    return needs(found, manifest, extents(manifest, wanted.slots))


def graphs(folder: Path, manifest: AnyManifest, buckets: Sequence[int]) -> Iterator[Graph]:
    """Each graph of the version; one that has a cache, in every bucket."""
    for name, file in manifest.graphs:
        if file is None:
            continue
        first = load(name, folder / file.file, *buckets[:1])
        yield first
        if first.cache_length is not None:
            yield from (load(name, folder / file.file, bucket) for bucket in buckets[1:])


def _one(
    graph: Graph,
    folder: Path,
    manifest: AnyManifest,
    library: Library,
    capability: str,
    sizes: dict[str, Extent],
    wanted: Wanted,
) -> Outcome:
    engines = folder / ENGINES
    target = capability if library.ahead_of_time else CURRENT
    path = engines / f"{plan_stem(graph.name, graph.cache_length, capability, library.name)}.json"
    reason = "asked to" if wanted.rebuild else _why_build(path, folder, manifest, library, capability, sizes)
    if reason is None:
        return Outcome(read_card(path), "current")
    timings = timing_cache.cache_path(engines, library, capability, wanted.gpu)
    engines.mkdir(exist_ok=True)
    built = build(graph, sizes, library, target, timings)
    return Outcome(save(built, graph, sizes, engines, manifest, library, capability), reason)


def _why_build(
    path: Path, folder: Path, manifest: AnyManifest, library: Library, capability: str, sizes: dict[str, Extent]
) -> str | None:
    """None where the plan that is there will do."""
    if not path.is_file():
        return "new"
    try:
        card = read_card(path)
        others = (foreign(card, library.name, library.version, each) for each in capability.split(","))
        reason = stale(card, manifest) or next((why for why in others if why is not None), None)
        plan_path(folder, card)
    except ModelError as error:
        return str(error)
    if reason is None and card.max_slots < sizes["B"].largest:
        return f"it holds {card.max_slots} slots"
    return reason


def _remove_strays(engines: Path, manifest: AnyManifest) -> None:
    """Plans that nobody runs: of graphs that are no more what they were, or for GPUs that another one serves, too."""
    cards = {}
    for path in engines.glob("*.json"):
        with contextlib.suppress(ModelError):
            cards[path] = read_card(path)
    for path, card in cards.items():
        if stale(card, manifest) or any(_replaces(other, card) for other in cards.values()):
            (engines / card.plan.file).unlink(missing_ok=True)
            path.unlink()


def _replaces(new: PlanCard, old: PlanCard) -> bool:
    same = (new.key, new.module, new.module_version) == (old.key, old.module, old.module_version)
    return same and new.max_slots >= old.max_slots and set(new.capabilities) > set(old.capabilities)
