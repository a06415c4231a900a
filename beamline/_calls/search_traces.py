"""Traces of the search, as the public types have them."""

from __future__ import annotations

from typing import Literal

from beamline._calls.answers import FINISH_REASONS
from beamline.protos import beamline_pb2 as pb
from beamline.types import SearchCandidate, SearchStep, SearchTrace

_FATES: dict[int, Literal["live", "pruned", "finished"]] = {
    pb.SEARCH_FATE_LIVE: "live",
    pb.SEARCH_FATE_PRUNED: "pruned",
    pb.SEARCH_FATE_FINISHED: "finished",
}


def trace_of(message: pb.SearchTrace) -> SearchTrace:
    return SearchTrace(
        message.beam_size,
        message.samples,
        message.length_penalty,
        tuple(map(step_of, message.steps)),
        tuple((end.step, end.candidate) for end in message.hypotheses),
        message.truncated,
    )


def step_of(message: pb.SearchStep) -> SearchStep:
    candidates = tuple(
        SearchCandidate(
            each.id if each.HasField("id") else None,
            each.piece,
            each.parent,
            each.score,
            each.normalized_score,
            _FATES[each.fate],
            FINISH_REASONS.get(each.finish_reason),
        )
        for each in message.candidates
    )
    return SearchStep(message.number, candidates, message.forced, message.part)
