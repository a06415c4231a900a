"""What a tie is, decided here for every test: two answers may differ only where, at their first divergence, the
competing candidates' scores differ by less than 1e-4."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

TIE = 1e-4


def same_or_tie(
    tokens: Sequence[int],
    log_probs: Sequence[float],
    other_tokens: Sequence[int],
    other_log_probs: Sequence[float],
) -> bool:
    if tuple(tokens) == tuple(other_tokens):
        return True
    pairs = zip(tokens, other_tokens, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:  # one is the beginning of the other: not a matter of two candidates
        return False
    score = list(accumulate(log_probs))[first]
    other = list(accumulate(other_log_probs))[first]
    return abs(score - other) < TIE
