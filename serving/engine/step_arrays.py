"""Between requests and a step's arrays: what the host adds to a step, and each request's part of what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from beamline.serving.contract.backend import StepInputs, StepOutputs
from beamline.serving.engine.outputs import Alternatives
from beamline.serving.engine.request import Request
from beamline.serving.engine.search.beam_search import StepView
from beamline.serving.engine.search.edits import BeamEdits, EditArrays
from beamline.serving.engine.search.sampler import Sampler


class HostPart(NamedTuple):
    """What the host adds to a step for one request."""

    forced: int | None
    edits: Sequence[BeamEdits]  # per beam
    draws: Sequence[tuple[int, float]]  # samples with their random numbers
    reports: bool  # the likeliest words of each beam


_NOTHING = HostPart(None, (), (), False)


def host_part(request: Request, ahead: int = 0) -> HostPart:
    """Of the next step, or of the one so many steps further, where no logits processor needs to see the tokens before
    it."""
    search = request.search
    forced, edits = search.forced_token(ahead), request.processors.edits(search, ahead)
    draws = search.draws(ahead) if isinstance(search, Sampler) else ()
    reports = search.options.top_log_probs > 0
    if forced is None and not (edits or draws or reports):
        return _NOTHING
    return HostPart(forced, edits, draws, reports)


def step_inputs(
    requests: Sequence[Request], parts: Sequence[HostPart], beams: int, vocabulary: int, arrays: EditArrays
) -> StepInputs:
    """The arrays of a step in which these requests take part, each with its own part."""
    if all(part is _NOTHING for part in parts):
        arrays.release()
        return _plain_inputs(len(parts), beams)
    index, scale, add = arrays.write([part.edits for part in parts], beams)
    rows: list[int] = []
    settings: list[tuple[float, ...]] = []
    reported: list[int] = []
    for number, (request, part) in enumerate(zip(requests, parts, strict=True)):
        search, options = request.search, request.search.options
        for sample, uniform in part.draws:
            rows.append(number * beams + sample)
            settings.append((uniform, options.temperature, options.top_k or vocabulary, options.top_p, options.min_p))
        if part.reports:
            reported += range(number * beams, number * beams + search.width)
    return StepInputs(
        np.array([-1 if part.forced is None else part.forced for part in parts], np.int64),
        index,
        scale,
        add,
        np.array(rows, np.int64),
        np.array(settings, np.float32).reshape(-1, 5),
        np.array(reported, np.int64),
    )


@lru_cache(maxsize=256)
def _plain_inputs(batch: int, beams: int) -> StepInputs:
    """Of a step to which the host adds nothing, as to most: the same object each time, so that a backend can tell that
    it has these arrays already."""
    nothing = np.zeros((batch, beams, 0), np.float32)
    inputs = StepInputs(np.full(batch, -1, np.int64), np.zeros((batch, beams, 0), np.int64), nothing, nothing)
    for each in (inputs.forced, inputs.edit_index, nothing, inputs.sample_rows, inputs.sampling, inputs.report_rows):
        each.flags.writeable = False
    return inputs


def step_views(outputs: StepOutputs, requests: Sequence[Request]) -> list[StepView]:
    """Each request's own part, without the beams that only pad it to the batch's width."""
    tokens, parents, scores = outputs.tokens.tolist(), outputs.parents.tolist(), outputs.scores.tolist()
    candidate_scores = outputs.candidate_scores.tolist()
    candidate_tokens = outputs.candidate_tokens.tolist()
    candidate_parents = outputs.candidate_parents.tolist()
    alternatives = _alternatives(outputs, requests)
    for row, request in enumerate(requests):
        width = request.search.width
        del tokens[row][width:], parents[row][width:], scores[row][width:]
    candidates = (candidate_scores, candidate_tokens, candidate_parents)
    return list(map(StepView, tokens, parents, scores, *candidates, alternatives))


def _alternatives(outputs: StepOutputs, requests: Sequence[Request]) -> Sequence[Sequence[Alternatives]]:
    if not len(outputs.top_tokens):
        return [()] * len(requests)
    rows = iter(zip(outputs.top_tokens.tolist(), outputs.top_log_probs.tolist(), strict=True))
    found = []
    for request in requests:
        count = request.search.options.top_log_probs
        found.append([_best(*next(rows), count) for _ in range(request.search.width if count else 0)])
    return found


def _best(tokens: Sequence[int], log_probs: Sequence[float], count: int) -> Alternatives:
    return tuple(zip(tokens[:count], log_probs[:count], strict=True))
