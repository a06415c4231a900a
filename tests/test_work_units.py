"""How tests are dealt out to parallel workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.fixture_cache import ROOT
from tests.support.work_units import SHARED, arrange


@dataclass(frozen=True)
class Item:
    name: str
    file: str
    fixturenames: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.file)

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.marks else None


def arranged(*items: Item) -> list[str]:
    given = cast(Any, list(items))
    arrange(given)
    return [item.name for item in given]


def test_files_stay_together_and_in_order() -> None:
    assert arranged(Item("a", "one.py"), Item("b", "one.py"), Item("c", "two.py")) == ["a", "b", "c"]


def test_a_file_for_each_shared_fixture_goes_first() -> None:
    one, other = SHARED[:2]
    items = [
        Item("none", "none.py"),
        Item("both", "both.py", (one, other)),
        Item("its other one", "one.py"),
        Item("one", "one.py", (one, "of_the_file")),
        Item("one again", "again.py", (one,)),
        Item("left out", "full.py", (one,), marks=("full",)),
    ]
    assert arranged(*items) == ["its other one", "one", "both", "none", "one again", "left out"]


def test_a_file_that_takes_long_is_before_the_others() -> None:
    items = [Item("a", "one.py"), Item("b", "two.py"), Item("c", "two.py", marks=("starts_early",))]
    assert arranged(*items) == ["b", "c", "a"]


@pytest.mark.parametrize("fixture", SHARED)
def test_what_is_called_shared_is_a_fixture_of_the_session(fixture: str) -> None:
    defined = re.compile(rf'@pytest\.fixture\(scope="session"\)\ndef {fixture}\(')
    assert any(defined.search(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("conftest.py"))
