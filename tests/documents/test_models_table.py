"""README's table of supported models is what the registry says."""

from __future__ import annotations

from beamline.converters.families import families
from docs.models_table import PAGE, page, table


def test_it_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "README.md's table of supported models is not current: run 'make docs'"
    assert table() in text  # the markers are there


def test_every_family_and_type_is_in_it() -> None:
    text = table()
    for family in families():
        assert family.description in text
        assert all(f"`{name}`" in text for name in family.model_types)
