"""The cache of exported fixtures: made once, and anew as soon as anything that made it is another."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixture_cache import KEPT, ROOT, FixtureCache

made: list[str] = []


def maker(folder: Path, text: str = "a") -> None:
    made.append(text)
    (folder / "deep").mkdir()
    (folder / "deep" / "file.txt").write_text(text)


def failing(folder: Path) -> None:
    (folder / "half.txt").write_text("half")
    raise RuntimeError("interrupted")


MODULE = maker.__module__


@pytest.fixture
def cache(tmp_path: Path) -> FixtureCache:
    """Over a project of its own in which this module imports another, inside a function, and that a third."""
    files = {
        f"{MODULE.replace('.', '/')}.py": "def f():\n    from ours import near",
        "ours/__init__.py": "",
        "ours/near.py": "from . import far",
        "ours/far.py": "WIDTH = 1",
        "ours/unrelated.py": "",
        "ours/apart.py": "",
        "data.txt": "1",
    }
    for name, text in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made.clear()
    return FixtureCache(tmp_path / "cache", tmp_path / "project", ("torch==1",))


def fill(cache: FixtureCache, **options: Any) -> str:
    """The text that it holds, in a folder of its own."""
    into = cache.folder.parent / f"copy-{len(list(cache.folder.parent.iterdir()))}"
    return (cache.fill(into, maker, **options) / "deep" / "file.txt").read_text()


def test_is_made_once(cache: FixtureCache) -> None:
    assert [fill(cache), fill(cache)] == ["a", "a"]
    assert made == ["a"]


def squares(numbers: list[int]) -> list[int]:
    made.append("squares")
    return [number * number for number in numbers]


def test_answers_are_kept_too(cache: FixtureCache) -> None:
    assert [cache.answers(squares, numbers=numbers) for numbers in ([2, 3], [4], [2, 3])] == [[4, 9], [16], [4, 9]]
    assert made == ["squares"] * 2


def test_parameters_have_entries_of_their_own(cache: FixtureCache) -> None:
    assert [fill(cache, text=text) for text in "xyx"] == ["x", "y", "x"]
    assert made == ["x", "y"]


@pytest.mark.parametrize("file", [f"{MODULE.replace('.', '/')}.py", "ours/__init__.py", "ours/near.py", "ours/far.py"])
def test_another_source_makes_it_anew(cache: FixtureCache, file: str) -> None:
    fill(cache)
    with (cache.project / file).open("a") as source:
        source.write("\n# changed")
    fill(cache)
    assert len(made) == 2


@pytest.mark.parametrize("file", ["ours/unrelated.py", "ours/apart.py", "data.txt"])
def test_what_it_does_not_use_may_change(cache: FixtureCache, file: str) -> None:
    fill(cache)
    (cache.project / file).write_text("2")
    fill(cache)
    assert len(made) == 1


@pytest.mark.parametrize("file", ["ours/apart.py", "data.txt"])
def test_what_it_is_said_to_use_counts(cache: FixtureCache, file: str) -> None:
    named: dict[str, Any] = {"runs": ["ours.apart"], "files": [cache.project / "data.txt"]}
    fill(cache, **named)
    (cache.project / file).write_text("2")
    fill(cache, **named)
    assert len(made) == 2


def test_another_version_of_a_package_makes_it_anew(cache: FixtureCache) -> None:
    fill(cache)
    fill(replace(cache, packages=("torch==2",)))
    assert len(made) == 2


def test_a_module_that_is_not_found_is_an_error(cache: FixtureCache) -> None:
    with pytest.raises(ValueError, match=r"no source of ours\.gone"):
        fill(cache, runs=["ours.gone"])


def test_a_copy_may_be_changed(cache: FixtureCache, tmp_path: Path) -> None:
    (cache.fill(tmp_path / "mine", maker) / "deep" / "file.txt").write_text("changed")
    assert fill(cache) == "a"
    assert len(made) == 1


def test_a_damaged_entry_is_made_anew(cache: FixtureCache) -> None:
    fill(cache)
    next(cache.folder.rglob("file.txt")).write_text("damaged")
    assert fill(cache) == "a"
    assert len(made) == 2


def test_a_maker_that_fails_leaves_nothing(cache: FixtureCache, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted"):
        cache.fill(tmp_path / "mine", failing)
    assert not list(cache.folder.rglob("half.txt"))
    assert not (tmp_path / "mine").exists()


def test_entries_of_old_sources_go(cache: FixtureCache) -> None:
    fill(cache, text="another's")
    for number in range(KEPT + 3):
        (cache.project / "ours" / "far.py").write_text(f"WIDTH = {number}")
        fill(cache)
    assert len([path for path in cache.folder.iterdir() if path.is_dir()]) == KEPT + 1
    fill(cache)
    assert len(made) == 1 + KEPT + 3  # the newest is there


def test_what_was_not_used_for_weeks_goes(cache: FixtureCache) -> None:
    fill(cache, text="old")
    (old,) = [path for path in cache.folder.iterdir() if path.is_dir()]
    os.utime(old, (0, 0))
    fill(cache, text="new")
    assert not old.exists()
    os.utime(next(path for path in cache.folder.iterdir() if path.is_dir()), (0, 0))
    fill(cache, text="new")  # is used
    fill(cache, text="newer")
    assert made == ["old", "new", "newer"]
    assert len([path for path in cache.folder.iterdir() if path.is_dir()]) == 2


_WORKER = """
import sys, time
from pathlib import Path
from tests import test_fixture_cache as this
from tests.support.fixture_cache import FixtureCache

def slowly(folder, text="a"):
    with open(sys.argv[3], "a") as log:
        log.write("made\\n")
    (folder / "file.txt").write_text(text)

slowly.__module__, slowly.__qualname__ = this.MODULE, "slowly"
print("waiting", flush=True)
sys.stdin.readline()
FixtureCache(Path(sys.argv[1]), Path(sys.argv[2]), ()).fill(Path(sys.argv[4]), slowly)
"""


def test_of_many_workers_one_makes_it(cache: FixtureCache, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _WORKER,
                str(cache.folder),
                str(cache.project),
                str(log),
                str(tmp_path / f"of-{number}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for number in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "waiting\n"
    for worker in workers:  # all at once
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate(timeout=120)
        assert worker.returncode == 0
    assert log.read_text() == "made\n"
    assert [(tmp_path / f"of-{number}" / "file.txt").read_text() for number in range(4)] == ["a"] * 4
