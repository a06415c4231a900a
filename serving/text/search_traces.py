"""Traces of the search as the messages that a client gets."""

from __future__ import annotations

from beamline.protos import beamline_pb2 as pb
from beamline.serving.engine.outputs import Candidate, Fate, FinishReason, Trace, TraceStep
from beamline.serving.text.model_card import Tokenizer

FINISH_REASON = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}
_FATE = {Fate.LIVE: pb.SEARCH_FATE_LIVE, Fate.PRUNED: pb.SEARCH_FATE_PRUNED, Fate.FINISHED: pb.SEARCH_FATE_FINISHED}


def search_trace(trace: Trace, tokenizer: Tokenizer, part: int = 0, with_steps: bool = True) -> pb.SearchTrace:
    return pb.SearchTrace(
        beam_size=trace.width,
        samples=trace.samples,
        length_penalty=trace.length_penalty,
        steps=[search_step(step, tokenizer, part) for step in trace.steps] if with_steps else (),
        hypotheses=[pb.SearchEnd(step=step, candidate=candidate) for step, candidate in trace.ends],
        truncated=trace.truncated,
    )


def search_step(step: TraceStep, tokenizer: Tokenizer, part: int = 0) -> pb.SearchStep:
    candidates = [_candidate(each, tokenizer) for each in step.candidates]
    return pb.SearchStep(number=step.number, candidates=candidates, forced=step.forced, part=part)


def _candidate(candidate: Candidate, tokenizer: Tokenizer) -> pb.SearchCandidate:
    return pb.SearchCandidate(
        id=candidate.token,
        piece="" if candidate.token is None else tokenizer.token(candidate.token),
        parent=candidate.parent,
        score=candidate.score,
        normalized_score=candidate.normalized_score,
        fate=_FATE[candidate.fate],
        finish_reason=None if candidate.finish_reason is None else FINISH_REASON[candidate.finish_reason],
    )
