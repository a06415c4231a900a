"""Text for tests, from what every machine has."""

from __future__ import annotations

import random
from functools import cache
from pydoc_data.topics import topics

# Whatever has ever made two tokenizers differ.
_ODDITIES = [
    *"abcXYZ .,;:!?*=-_()[]<>/'\"0129",
    *[" "] * 8,
    *["  ", "\t", "\n", "\r\n", "\0", "\x01", "\x7f", "\x85", "\u00a0", "\u3000", "\u2028"],
    *["\u200b", "\u200c", "\u200d", "\ufeff", "\ufffd", "\ue000", "\u2581", "\u2581\u2581"],
    *["<s>", "</s>", "<unk>", "<pad>", "<0x41>", ">>fr<<", "[X]", "<sep>"],
    *["e\u0301", "\u0301", "\u0308", "a\u0327\u0301", "\u0344", "\u212b", "\u00a8", "caf\u00e9", "\u00df"],
    *["\ufb01", "\uff21\uff22", "\uff76\uff9e", "\uff9e", "\u304b\u3099", "\u1112\u1161\u11ab", "\ud55c"],
    *["\u4f60\u597d", "\u043c\u0438\u0440", "\u03b1\u03b2", "\u0639\u0631\u0628", "\u0939\u093f\u0928"],
    *["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\U0001d400"],
    *["\u00bd", "\u2460", "\u337f", "\ufdfa", "\u2026"],
    *["***", "=====", "-----", "aaa", "000", "the ", "value"],
]


@cache
def english_lines() -> list[str]:
    """About 11,000 lines of Python's own documentation."""
    return [line for name in sorted(topics) for line in topics[name].split("\n")]


def odd_lines(count: int, seed: int = 0) -> list[str]:
    """Many scripts, emoji, controls, combining and full-width characters, spaces, symbols spelt out."""
    rng = random.Random(seed)
    fixed = ["", " ", "  ", "\u2581", " a", "a ", " a  b ", "<s>", "</s>", "<unk>"]
    fixed += [char * n for char in "*=- " for n in range(1, 40)]
    lengths = (1, 2, 3, 5, 8, 20, 60)
    while len(fixed) < count:
        fixed.append("".join(rng.choice(_ODDITIES) for _ in range(rng.choice(lengths))))
    return fixed[:count]
