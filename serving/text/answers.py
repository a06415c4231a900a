"""One answer to a prompt as it grows: tokens in, pieces of text out, cut at a stop string."""

from __future__ import annotations

import math
from collections.abc import Sequence

from beamline.protos import beamline_pb2 as pb
from beamline.serving.engine.outputs import Alternatives, FinishReason, Hypothesis, Piece
from beamline.serving.text.detokenizer import Detokenizer, StopStrings
from beamline.serving.text.model_card import Tokenizer
from beamline.serving.text.search_traces import FINISH_REASON
from beamline.serving.text.stopping import score_of

_CONTEXT = 6  # tokens of the prompt that the first word's spelling may depend on


class Answer:
    """Collects until it is asked; so pieces that come faster than they are read become one."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        wanted: pb.GenerationOptions,
        length_penalty: float = 1.0,
    ) -> None:
        self.index = index
        self.tokens = 0  # generated, up to the stop string
        self.finished = False
        self.finish_reason: FinishReason | None = None
        self.score = -math.inf  # of a hypothesis: of what is left of it
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt[-_CONTEXT:])
        self._stops = StopStrings(stops)
        self._return_log_probs = wanted.return_log_probs or wanted.top_log_probs > 0
        self._return_tokens = wanted.return_tokens or self._return_log_probs
        self._received = 0
        self._pending = pb.GenerateReply(index=index)
        self._length_penalty = length_penalty
        self._log_probs: list[float] = []
        self._complete = False

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def echo(self, text: str, tokens: Sequence[pb.GeneratedToken]) -> None:
        self._pending.text += text
        if self._return_tokens:
            self._pending.tokens.extend(tokens)

    def take(self, piece: Piece) -> None:
        self._received += len(piece.tokens)
        self._add(piece.tokens, piece.token_log_probs, piece.alternatives)
        if piece.finish_reason is not None:
            self._finish(piece.finish_reason)

    def complete(self, hypothesis: Hypothesis) -> None:
        """The result: what was not streamed before, and why it ended."""
        known = self._received
        self._add(hypothesis.tokens[known:], hypothesis.token_log_probs[known:], hypothesis.alternatives[known:])
        self._finish(hypothesis.finish_reason)
        self._complete = True
        self.score = score_of(self._log_probs, self._length_penalty) if self.stopped else hypothesis.score

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], alternatives: Sequence[Alternatives]) -> None:
        for place, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            if self.finished or self.stopped:
                return
            self.tokens += 1
            self._log_probs.append(log_prob)
            self._pending.text += self._stops.push(self._detokenizer.push(token))
            if self._return_tokens:
                self._pending.tokens.append(self._token(token, log_prob, alternatives[place : place + 1]))
        if self.stopped:
            self._finish(FinishReason.STOP)

    def _token(self, token: int, log_prob: float, alternatives: Sequence[Alternatives]) -> pb.GeneratedToken:
        message = pb.GeneratedToken(id=token, piece=self._tokenizer.token(token))
        if self._return_log_probs:
            message.log_prob = log_prob
            for each in alternatives:
                message.top.extend(pb.TopToken(id=i, piece=self._tokenizer.token(i), log_prob=v) for i, v in each)
        return message

    def _finish(self, reason: FinishReason) -> None:
        if self.finished:
            return
        if not self.stopped:
            self._pending.text += self._stops.push(self._detokenizer.flush())
        if self.stopped:
            reason = FinishReason.STOP
        else:
            self._pending.text += self._stops.flush()
        self._pending.finish_reason = FINISH_REASON[reason]
        self.finished, self.finish_reason = True, reason

    def new_reply(self) -> pb.GenerateReply | None:
        """What has come since the last time."""
        pending = self._pending
        if not (pending.text or pending.tokens or pending.finish_reason):
            return None
        self._pending = pb.GenerateReply(index=self.index)
        return pending

    def whole(self) -> pb.Generation:
        """All of it, where nothing was asked for before."""
        pending = self._pending
        generation = pb.Generation(text=pending.text, tokens=pending.tokens, finish_reason=pending.finish_reason)
        if self._return_log_probs and self._complete:
            generation.score = self.score
        return generation
