"""docs/tree-cache.svg is what its script draws, and shows what the export's tree computes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from docs.tree_cache import BEAMS, PICTURE, STEPS, Entry, grow, picture


def test_it_is_current() -> None:
    assert picture() == PICTURE.read_text(encoding="utf-8"), "docs/tree-cache.svg is not current: run 'make docs'"
    assert ElementTree.fromstring(picture()).tag.endswith("svg")


def test_it_has_colours_for_both_kinds_of_screens() -> None:
    light, dark = PICTURE.read_text(encoding="utf-8").split("prefers-color-scheme: dark")
    assert "#ffffff" in light
    assert "#0d1117" in dark


def test_the_ancestry_is_that_of_the_tree() -> None:
    """By following parents, where the script gathers rows."""
    entries, rows = grow()
    assert len(entries) == BEAMS * len(STEPS)
    for beam, row in enumerate(rows):
        entry: Entry | None = entries[beam - BEAMS]
        seen = set()
        while entry is not None:
            seen.add(entry.place)
            entry = entry.parent
        assert {place for place, visible in enumerate(row) if visible} == seen
