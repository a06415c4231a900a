"""Real sentences that every Python has with it."""

from __future__ import annotations

from pydoc_data.topics import topics


def english_sentences(count: int) -> list[str]:
    """From Python's own documentation: prose, not tables and code."""
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    plain = (" ".join(part.split()) for part in paragraphs if not part.startswith((" ", "*", "-", "+", "|")))
    found = [
        sentence + "."
        for paragraph in plain
        for sentence in paragraph.rstrip(".").split(". ")
        if sentence[:1].isupper() and 5 <= len(sentence.split()) <= 40
    ]
    return found[:: max(1, len(found) // count)][:count]
