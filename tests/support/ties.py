"""What a tie is, decided here for every test: two answers may differ only where the candidates that competed differ in
their scores by less than 1e-4.

They compete at their first divergence, where a search keeps one of two continuations; and, once both are in a beam, as
whole hypotheses for a rank, by their scores per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

TIE = 1e-4


def same_or_tie(
    tokens: Sequence[int], log_probs: Sequence[float], other_tokens: Sequence[int], other_log_probs: Sequence[float]
) -> bool:
    if tuple(tokens) == tuple(other_tokens):
        return True
    as_wholes = abs(sum(log_probs) / len(tokens) - sum(other_log_probs) / len(other_tokens))
    pairs = zip(tokens, other_tokens, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:  # one is the beginning of the other
        return as_wholes < TIE
    totals, other_totals = list(accumulate(log_probs)), list(accumulate(other_log_probs))
    return min(as_wholes, abs(totals[first] - other_totals[first])) < TIE
