"""The comparison at the model's limit: positions, caches and masks that short sequences never reach.

A beam search by the original over hundreds of steps would take minutes. So the graphs decode greedily, and the original
judges the text that they wrote in one teacher-forced pass: each word must have been its best one, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from beamline.converters.certificate.graph_runner import Case, GraphRunner
from beamline.converters.certificate.original import log_probs, without_forbidden
from beamline.serving.contract.manifest import Manifest

if TYPE_CHECKING:
    from beamline.converters.tasks.generation import LoadedModel

LONGEST = 512  # tokens; a model with a larger limit is compared up to here


@dataclass(frozen=True)
class LongComparison:
    tokens: int  # of the longest sequence
    compared: int  # sequences
    exact: int  # those in which every word was the original's best one, ties included
    ties: int
    difference: float  # the largest of a log-probability


def compare_long(
    graphs: GraphRunner, loaded: LoadedModel, short: Case, tie: float, longest: int = LONGEST
) -> LongComparison:
    """A case at the limit, in a batch with a short one, which must not suffer from its neighbour's length."""
    case, steps = long_case(graphs.manifest, longest)
    cases = [case, short]
    exact = ties = 0
    difference = 0.0
    for each, beams in zip(cases, graphs.beams(cases, 1, steps), strict=True):
        text = beams.sequences[0]
        believed = log_probs(loaded, each.source, [text[:-1]])[0]  # [T, V]
        written = torch.tensor(text[1:])[:, None]
        behind = believed[len(each.prompt) - 1 :]
        missed = _missed(loaded, behind.clone(), written[len(each.prompt) - 1 :, 0])
        exact += missed < tie
        ties += 0 < missed < tie
        found = graphs.token_log_probs([each], np.array([text[:-1]]), np.array([text[1:]]))[0]
        difference = max(difference, float(np.abs(found - believed.gather(1, written)[:, 0].numpy()).max()))
    return LongComparison(
        max(len(case.source), len(case.prompt) + steps), len(cases), int(exact), int(ties), difference
    )


def long_case(manifest: Manifest, longest: int = LONGEST) -> tuple[Case, int]:
    """A random case that is as long as the model allows, or `longest`, and how many steps follow it."""
    random = np.random.default_rng(4)
    vocabulary, limits = manifest.vocabulary, manifest.limits
    words = [word for word in range(vocabulary.source_size) if word != vocabulary.pad_id]
    target = min(longest, limits.max_target_length)
    if manifest.task == "generate":
        steps = max(1, target // 2)
        length = max(1, min(target - steps, limits.max_source_length))
        return Case((), tuple(random.choice(words, length).tolist())), steps
    length = min(longest, limits.max_source_length)
    if manifest.feature_width:
        grid = random.standard_normal((length, manifest.feature_width)).astype(np.float32)
        return Case(grid, (vocabulary.start_id,)), target - 1
    return Case(tuple(random.choice(words, length).tolist()), (vocabulary.start_id,)), target - 1


def _missed(loaded: LoadedModel, rows: torch.Tensor, written: torch.Tensor) -> float:
    """By how much the worst of the written words [T] is below the original's best: log-probabilities rows [T, V]. Ends
    are no choice: the search goes on."""
    rows = without_forbidden(loaded, rows)
    rows[:, list(loaded.vocabulary.eos_ids)] = -torch.inf
    return float((rows.max(1).values - rows.gather(1, written[:, None])[:, 0]).max())
