"""A small set of cases in which every pair of values occurs. A whole grid of exports would take an hour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]


def covering(*axes: Sequence[Any]) -> list[Case]:
    """Greedily: always the case that covers the most pairs that no other has yet."""

    def pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
        return {(i, case[i], j, case[j]) for i, j in combinations(range(len(axes)), 2)}

    cases = list(product(*axes))
    missing = set().union(*(pairs(case) for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen
