"""Text for comparing tokenizers, on any machine: the documentation that comes with Python, and what is hard in it."""

from __future__ import annotations

from itertools import cycle, islice
from pydoc_data.topics import topics

# Other scripts, combining and full-width characters, spaces in odd places, symbols that look like control tokens.
HARD = (
    "Grüße aus Köln: „Straße“ – 3 € für 1½ Stück…",
    "naïve café, cafe\u0301, ﬁne ﬂuﬀ, ｆｕｌｌ－ｗｉｄｔｈ ＡＢＣ１２３",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم",
    "你好，世界。こんにちは世界。안녕하세요 세계. สวัสดีชาวโลก नमस्ते दुनिया",
    "👍🏽 emoji 👨‍👩‍👧‍👦 and flags 🇩🇪🇫🇷, math ∑∫√∞ ≠ ≤",
    "  leading, double  inner,\ttabs\tand trailing   ",
    "<s> </s> <unk> <pad> ▁ not_special ▁▁x",
    "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, line\u2028separator, bom\ufeff",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\to\\file",
    "a",
    " ",
    "0123456789 1,234.56 -7 +8 1e-9 0xFF",
    "ALL CAPS, MiXeD cAsE, snake_case, camelCase, kebab-case",
    "!!!!!!!!! ......... ********* ---------",
)


def parity_lines(count: int) -> list[str]:
    """So many lines, the hard ones first; the same ones every time."""
    lines = [
        *HARD,
        *(line for topic in sorted(topics) for line in topics[topic].splitlines() if line.strip()),
    ]
    return list(islice(cycle(lines), count))
