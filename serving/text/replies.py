"""The engine's results as the messages that a client gets.

For a text that was split, the parts' best hypotheses become one: texts joined in the layout of the source,
tokens and log-probabilities one behind the other, scores added, and the worst of the finish reasons. Its
timings are the longest wait of a part, and all parts' encoding and decoding time added: the work that was
done, which may be more than the time that passed, because parts run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamline.protos import beamline_pb2 as pb
from beamline.serving.engine.outputs import FinishReason, Hypothesis, Result, Timings
from beamline.serving.text.model_card import Tokenizer
from beamline.serving.text.search_traces import FINISH_REASON, search_trace
from beamline.serving.text.stopping import best_first, ended, reordered
from beamline.serving.text.translation_inputs import PreparedInput

_BEST_TO_WORST = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIME_LIMIT)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reply shall carry besides the text."""

    scores: bool
    tokens: bool
    alignment: bool

    @classmethod
    def by(cls, options: pb.DecodingOptions) -> Wanted:
        return cls(options.return_scores, options.return_tokens, options.return_alignment)


class ReplyBuilder:
    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self._source = source
        self._target = target

    def translation(
        self, prepared: PreparedInput, results: Sequence[Result], wanted: Wanted, streamed: bool = False
    ) -> pb.Translation:
        """`results` answer the input's requests, in order. Where they were streamed, the steps of their traces were,
        too."""
        traces = [(part, result.trace) for part, result in enumerate(results) if result.trace is not None]
        candidates = self._candidates(prepared, results)
        options = prepared.requests[0].options
        if prepared.stops and len(candidates) > 1 and (options is None or not options.samples):
            ends = [(hypothesis.finish_reason, hypothesis.score) for _, hypothesis in candidates]
            places = best_first(ends, shown=1 if streamed else 0)
            candidates = [candidates[place] for place in places]
            traces = [(part, reordered(trace, places)) for part, trace in traces]
        return pb.Translation(
            hypotheses=[self._hypothesis(text, hypothesis, wanted) for text, hypothesis in candidates],
            source_tokens=sum(request.source_length for request in prepared.requests),
            target_tokens=len(candidates[0][1].tokens),
            timings=milliseconds([result.timings for result in results]),
            source=self._source_tokens(prepared) if wanted.tokens and wanted.alignment else (),
            search_traces=[search_trace(trace, self._target, part, not streamed) for part, trace in traces],
        )

    def _source_tokens(self, prepared: PreparedInput) -> list[pb.Token]:
        ids = [token for request in prepared.requests for token in request.source]
        return [pb.Token(id=token, piece=self._source.token(token)) for token in ids]

    def _candidates(self, prepared: PreparedInput, results: Sequence[Result]) -> list[tuple[str, Hypothesis]]:
        if len(results) == 1:
            return [self._candidate(prepared, [hypothesis]) for hypothesis in results[0].hypotheses]
        return [self._candidate(prepared, [result.hypotheses[0] for result in results])]

    def _candidate(self, prepared: PreparedInput, parts: Sequence[Hypothesis]) -> tuple[str, Hypothesis]:
        """The forced prefix belongs to the text, though it was not generated."""
        found = [
            ended(part, request, prepared.stops, self._target)
            for request, part in zip(prepared.requests, parts, strict=True)
        ]
        texts, hypotheses = [text for text, _ in found], [hypothesis for _, hypothesis in found]
        text = texts[0] if prepared.layout is None else prepared.layout.join(texts)
        return text, hypotheses[0] if len(hypotheses) == 1 else _joined(hypotheses)

    def _hypothesis(self, text: str, hypothesis: Hypothesis, wanted: Wanted) -> pb.Hypothesis:
        reply = pb.Hypothesis(text=text, finish_reason=FINISH_REASON[hypothesis.finish_reason])
        if wanted.scores:
            reply.score = hypothesis.score
            reply.token_log_probs.extend(hypothesis.token_log_probs)
        if wanted.tokens:
            reply.tokens.extend(pb.Token(id=i, piece=self._target.token(i)) for i in hypothesis.tokens)
        if wanted.alignment and hypothesis.alignment is not None:
            reply.alignment.extend(pb.AlignmentRow(weights=row) for row in hypothesis.alignment)
        return reply


def _joined(parts: Sequence[Hypothesis]) -> Hypothesis:
    return Hypothesis(
        tokens=tuple(token for part in parts for token in part.tokens),
        token_log_probs=tuple(value for part in parts for value in part.token_log_probs),
        score=sum(part.score for part in parts),
        finish_reason=max((part.finish_reason for part in parts), key=_BEST_TO_WORST.index),
    )


def milliseconds(parts: Sequence[Timings]) -> pb.Timings:
    return pb.Timings(
        queue_ms=1000 * max(part.queue for part in parts),
        encode_ms=1000 * sum(part.encode for part in parts),
        decode_ms=1000 * sum(part.decode for part in parts),
    )
