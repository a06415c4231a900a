"""Which shapes a plan is made for. B, K, S and the rest vary between a smallest and a largest size; C is fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beamline.converters.tensorrt.graph import CACHE_AXIS, Graph
from beamline.serving.contract.manifest import AnyManifest, Manifest, PooledManifest
from beamline.serving.contract.tensorrt_plans import ShapeRange
from beamline.serving.errors import ConversionError

_FIRST_BUCKET, _GROWTH = 64, 4  # a plan holds all weights, so buckets are few
_USUAL_LENGTH = 32
# Prompts and their tokens that one run takes in. The engine asks for 512 tokens over all prompts at most; a plan would
# reserve memory for 512 of each (their attention to every entry of the cache), so more are taken in by several runs.
_PROMPTS, _PROMPT_TOKENS = 4, 128
# A score graph has [rows, length, words] in float32, twice (logits, log-probabilities), and a plan reserves memory for
# its largest shape: so many values are 1 GiB. A text that alone would need more can't be scored by a plan.
_SCORE_ROWS, SCORE_VALUES = 4, 2**28
_EDITS = 4096  # the longest list of edits that is padded; a longer one has at most every word once


@dataclass(frozen=True)
class Extent:
    smallest: int
    usual: int
    largest: int


def default_buckets(manifest: Manifest) -> tuple[int, ...]:
    """64, 256, 1024, ... and the worst case."""
    limit = worst_case(manifest)
    sizes = []
    size = _FIRST_BUCKET
    while 2 * size <= limit:  # one just below the limit would be weights for nothing
        sizes.append(size)
        size *= _GROWTH
    return (*sizes, limit)


def worst_case(manifest: Manifest) -> int:
    """The cache entries of a request none of whose beams share anything. As in the engine's plan."""
    limits = manifest.limits
    entries = limits.max_beam_size * (limits.max_target_length + 1)
    if manifest.task == "generate":
        return min(entries, 2 * limits.max_target_length + limits.max_beam_size)
    return entries


def chosen_buckets(manifest: AnyManifest, wanted: Sequence[int]) -> tuple[int, ...]:
    """Those that were asked for; and always the worst case, or a long request could not be finished. None for a model
    that has no cache because it writes nothing."""
    if isinstance(manifest, PooledManifest):
        return ()
    if not wanted:
        return default_buckets(manifest)
    limit = worst_case(manifest)
    too_small = [size for size in wanted if size < manifest.limits.max_beam_size]
    if too_small:
        raise ConversionError(
            f"a bucket of {too_small[0]} has no room for one step of {manifest.limits.max_beam_size} beams"
        )
    return tuple(sorted({*(size for size in wanted if size < limit), limit}))


def extents(manifest: AnyManifest, slots: int) -> dict[str, Extent]:
    def up_to(largest: int, usual: int) -> Extent:
        return Extent(1, min(usual, largest), largest)

    if isinstance(manifest, PooledManifest):
        return {"B": up_to(slots, max(1, slots // 2)), "S": up_to(manifest.max_source_length, _USUAL_LENGTH)}
    limits = manifest.limits
    return {
        "B": up_to(slots, max(1, slots // 2)),
        "K": up_to(limits.max_beam_size, manifest.defaults.beam_size),
        "S": up_to(limits.max_source_length, _USUAL_LENGTH),
        "T": up_to(limits.max_target_length, _USUAL_LENGTH),
        "Q": up_to(_PROMPT_TOKENS, _USUAL_LENGTH),
        "prefill.B": up_to(min(_PROMPTS, slots), 1),
        # Rows that are sampled, and rows of which the likeliest words are wanted.
        "R": Extent(0, 0, slots * limits.max_beam_size),
        "P": Extent(0, 0, slots * limits.max_beam_size),
        "E": Extent(0, 0, max(_EDITS, manifest.vocabulary.target_size)),
        **_of_score(manifest, slots),
    }


def _of_score(manifest: Manifest, slots: int) -> dict[str, Extent]:
    """The axes of the score graph that are shorter than elsewhere."""
    tokens = SCORE_VALUES // manifest.vocabulary.target_size
    length = max(1, min(manifest.limits.max_target_length, tokens))
    rows = max(1, min(_SCORE_ROWS, slots, tokens // length))
    return {"score.B": Extent(1, 1, rows), "score.T": Extent(1, min(_USUAL_LENGTH, length), length)}


def profile(graph: Graph, sizes: Mapping[str, Extent]) -> dict[str, ShapeRange]:
    """For each input of the graph, by the names of its axes."""
    if graph.cache_length is not None:
        sizes = {**sizes, CACHE_AXIS: Extent(graph.cache_length, graph.cache_length, graph.cache_length)}
    own = f"{graph.name}."
    sizes = {**sizes, **{axis.removeprefix(own): size for axis, size in sizes.items() if axis.startswith(own)}}
    unknown = sorted(
        {axis for each in graph.inputs for axis in each.axes if isinstance(axis, str) and axis not in sizes}
    )
    if unknown:
        raise ConversionError(f"{graph.path.name}: it is not known how large the axes {', '.join(unknown)} can be")

    def at(axes: Sequence[str | int], part: str) -> tuple[int, ...]:
        return tuple(getattr(sizes[axis], part) if isinstance(axis, str) else axis for axis in axes)

    return {
        each.name: ShapeRange(
            smallest=at(each.axes, "smallest"), usual=at(each.axes, "usual"), largest=at(each.axes, "largest")
        )
        for each in graph.inputs
    }
