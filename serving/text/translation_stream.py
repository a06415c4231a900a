"""A translation as it comes: the parts of a text in its order, each with the words that are certain."""

from __future__ import annotations

from collections.abc import Sequence

from beamline.serving.engine.outputs import Output, Piece, Result, TraceStep
from beamline.serving.engine.request import Request
from beamline.serving.text.model_card import Tokenizer
from beamline.serving.text.stopping import StoppableText, ended
from beamline.serving.text.translation_inputs import PreparedInput


class _Part:
    """The text of one part, so far."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._stops = stops
        self._growing = StoppableText(tokenizer, request.prefix, stops)
        self.result: Result | None = None

    @property
    def text(self) -> str:
        return self._growing.text

    def take(self, piece: Piece) -> None:
        self._growing.push(piece.tokens)

    def complete(self, result: Result) -> None:
        self.result = result
        whole, _ = ended(result.hypotheses[0], self._request, self._stops, self._tokenizer)
        if whole.startswith(self.text):
            self._growing.text = whole
        else:
            self._growing.flush()


class GrowingTranslation:
    """One input's best translation. Parts are decoded side by side; of those behind the first unfinished one nothing is
    shown yet."""

    def __init__(self, prepared: PreparedInput, tokenizer: Tokenizer) -> None:
        self.prepared = prepared
        self._layout = prepared.layout
        self._parts = [_Part(request, tokenizer, prepared.stops) for request in prepared.requests]
        self._shown = 0  # characters
        self._new_steps: list[tuple[int, TraceStep]] = []  # of the parts' searches, where they are traced

    def take(self, part: int, output: Output) -> None:
        if isinstance(output, Result):
            self._parts[part].complete(output)
            self._new_steps += [(part, step) for step in (output.trace.steps if output.trace is not None else ())]
        elif isinstance(output, TraceStep):
            self._new_steps.append((part, output))
        elif isinstance(output, Piece) and output.index == 0:
            self._parts[part].take(output)

    @property
    def results(self) -> Sequence[Result] | None:
        """All of them, or none."""
        results = [part.result for part in self._parts if part.result is not None]
        return results if len(results) == len(self._parts) else None

    def new_steps(self) -> list[tuple[int, TraceStep]]:
        new, self._new_steps = self._new_steps, []
        return new

    def new_text(self) -> str:
        """What can be appended to what was shown."""
        text = self._certain()
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _certain(self) -> str:
        finished = 0
        while finished < len(self._parts) and self._parts[finished].result is not None:
            finished += 1
        known = [part.text for part in self._parts[: finished + 1]]
        if self._layout is None:
            return known[0]
        if finished < len(self._parts) and not known[-1]:
            known.pop()  # what stands between two parts depends on how the second begins
            return self._layout.join(known, complete=False)
        return self._layout.join(known, complete=finished == len(self._parts))
