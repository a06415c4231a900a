"""Stop strings of translations: a hypothesis ends before the first one that it writes.

Of greedy search and samples that is where Hugging Face `generate` ends, token for token (its text has the stop string,
too). Beams are chosen on the device, which knows no text: there it cuts what the search has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from beamline.serving.engine.outputs import FinishReason, Hypothesis, Piece, Trace
from beamline.serving.engine.request import Request
from beamline.serving.text.detokenizer import Detokenizer, StopStrings
from beamline.serving.text.model_card import Tokenizer


class StoppableText:
    """A hypothesis as it grows: its text, up to a stop string, and how many of its tokens that took. The prefix belongs
    to the text, but is not searched: a caller knows what it says."""

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self.text = "".join(map(self._detokenizer.push, prefix))
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.stopped:
                return
            self.tokens += 1
            self.text += self._stops.push(self._detokenizer.push(token))

    def flush(self) -> None:
        """No more tokens come."""
        self.text += self._stops.push(self._detokenizer.flush())
        self.text += self._stops.flush()


class StopWatch:
    """Of the requests of a call: which hypotheses have come to a stop string."""

    def __init__(self, requests: Sequence[Request], stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._requests = requests
        self._stops = stops
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, int], StoppableText] = {}  # by request and hypothesis

    def ends(self, request: int, piece: Piece) -> bool:
        """Whether no more is wanted of the piece's hypothesis."""
        key = (request, piece.index)
        if key not in self._texts:
            self._texts[key] = StoppableText(self._tokenizer, self._requests[request].prefix, self._stops)
        self._texts[key].push(piece.tokens)
        return self._texts[key].stopped


def ended(
    hypothesis: Hypothesis, request: Request, stops: Sequence[str], tokenizer: Tokenizer
) -> tuple[str, Hypothesis]:
    """The text of a hypothesis with its prefix, and what of it was written up to a stop string. The engine goes on for
    some steps before it hears of one; nothing of those is left."""
    if stops:
        text = StoppableText(tokenizer, request.prefix, stops)
        text.push(hypothesis.tokens)
        text.flush()
        if text.stopped:
            return text.text, _cut(hypothesis, request, text.tokens)
    return tokenizer.decode([*request.prefix, *hypothesis.tokens]), hypothesis


def score_of(log_probs: Sequence[float], length_penalty: float) -> float:
    """The score of what was kept. That of the whole would depend on how far the engine went on, and so on timing."""
    return sum(log_probs) / float(max(1, len(log_probs)) ** length_penalty)


def best_first(ends: Sequence[tuple[FinishReason | None, float]], shown: int = 0) -> list[int]:
    """The places of a beam search's hypotheses, of each why it ended and its score. The search has sorted them, but by
    the scores of what stop strings cut since then. Those that ran out of time stay behind, and the `shown` first ones,
    which a reader has already, in front."""
    places = list(range(len(ends)))
    if all(reason is not FinishReason.STOP for reason, _ in ends):
        return places
    behind = (FinishReason.TIME_LIMIT, None)
    return places[:shown] + sorted(places[shown:], key=lambda place: (ends[place][0] in behind, -ends[place][1]))


def reordered(trace: Trace, places: Sequence[int]) -> Trace:
    """A trace whose ends are in the order of the hypotheses."""
    return replace(trace, ends=tuple(trace.ends[place] for place in places if place < len(trace.ends)))


def _cut(hypothesis: Hypothesis, request: Request, tokens: int) -> Hypothesis:
    assert request.options is not None
    log_probs, rows = hypothesis.token_log_probs[:tokens], hypothesis.alignment
    return replace(
        hypothesis,
        tokens=hypothesis.tokens[:tokens],
        token_log_probs=log_probs,
        score=score_of(log_probs, request.options.length_penalty),
        finish_reason=FinishReason.STOP,
        alignment=rows if rows is None else rows[:tokens],
        alternatives=hypothesis.alternatives[:tokens],
    )
