"""In which order the workers of pytest-xdist take the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

# Session-scoped, made once in a run and kept by the cache of fixtures; minutes together, the dearest first.
SHARED = (
    "model_repository",
    "language_model",
    "renormalising_model",
    "plain_model",
    "reference_version",
    "tiny_lm",
    "pooled_repository",
)


def arrange(items: list[pytest.Item]) -> None:
    """Sorts the tests so that their files come in the order in which workers should take them: whole ones
    (`--dist loadfile`), for the sake of the fixtures of a file. (`loadgroup` does not group with pytest 9.2:
    pytest-xdist's issue 1386.)

    A file for each shared fixture goes first: so the workers make different ones, instead of waiting for each other's.
    Then the files that take long, so that at the end no worker works alone.
    """
    wanted: dict[Path, set[str]] = {}  # what the tests of a file need of the shared fixtures
    for item in items:
        if not _may_be_left_out(item):
            wanted.setdefault(item.path, set()).update(_fixtures(item).intersection(SHARED))
    first: list[Path] = []
    for fixture in SHARED:
        users = [path for path, needs in wanted.items() if fixture in needs and path not in first]
        if users:
            first.append(min(users, key=lambda path: len(wanted[path])))
    long = {item.path for item in items if item.get_closest_marker("starts_early")}
    places = {path: place for place, path in enumerate(first)}
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path not in long))


def _may_be_left_out(item: pytest.Item) -> bool:
    """By the `-m` of `make test`, which pytest reads later."""
    return any(item.get_closest_marker(name) is not None for name in ("full", "gpu"))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))
