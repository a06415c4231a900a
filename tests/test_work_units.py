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

    @property
    def nodeid(self) -> str:
        return f"{self.file}::{self.name}"

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.marks else None


def arranged(*items: Item) -> list[tuple[str, str]]:
    given = cast(Any, list(items))
    groups = arrange(given)
    assert list(groups) == given
    return [(item.name, groups[item]) for item in given]


def test_a_file_stays_together_and_in_order() -> None:
    items = [Item("a", "one.py"), Item("b", "one.py"), Item("c", "two.py")]
    assert arranged(*items) == [("a", "one.py"), ("b", "one.py"), ("c", "two.py")]


def test_a_maker_of_each_shared_fixture_goes_first_and_alone() -> None:
    first, second = SHARED[:2]
    items = [
        Item("other", "one.py"),
        Item("left out", "one.py", (first,), marks=("full",)),
        Item("with its file's", "one.py", (first, "of_the_file")),
        Item("plain", "two.py", (first,)),
        Item("behind it", "two.py", (first,)),
        Item("both", "two.py", (first, second)),
    ]
    assert arranged(*items) == [
        ("plain", first),
        ("both", second),
        ("other", "one.py"),
        ("left out", "one.py"),
        ("with its file's", "one.py"),
        ("behind it", "two.py"),
    ]


def test_a_file_that_takes_long_is_before_the_others() -> None:
    items = [Item("a", "one.py"), Item("b", "two.py"), Item("c", "two.py", marks=("starts_early",))]
    assert [name for name, _ in arranged(*items)] == ["b", "c", "a"]


@pytest.mark.parametrize("fixture", SHARED)
def test_what_is_called_shared_is_a_fixture_of_the_session(fixture: str) -> None:
    defined = re.compile(rf'@pytest\.fixture\(scope="session"\)\ndef {fixture}\(')
    assert any(defined.search(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("conftest.py"))
