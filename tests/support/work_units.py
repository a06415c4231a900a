"""What a worker of pytest-xdist takes at once, and in which order."""

from __future__ import annotations

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


def arrange(items: list[pytest.Item]) -> dict[pytest.Item, str]:
    """Sorts the tests, and says to which group each belongs.

    One test that needs each shared fixture goes first and by itself: so the workers make different ones, instead of
    waiting for each other's. Behind them, a file at a time, for the sake of its own fixtures; those that take long
    before the others, so that at the end no worker works alone.
    """
    makers: dict[pytest.Item, str] = {}
    for fixture in SHARED:
        users = [item for item in items if fixture in _fixtures(item) and item not in makers]
        if users:
            makers[min(users, key=lambda item: (_may_be_left_out(item), len(_fixtures(item))))] = fixture
    places = {item: place for place, item in enumerate(makers)}
    long = {item.path for item in items if item.get_closest_marker("starts_early")}
    items.sort(key=lambda item: (places.get(item, len(places)), item.path not in long))
    return {item: makers.get(item, item.nodeid.partition("::")[0]) for item in items}


def _may_be_left_out(item: pytest.Item) -> bool:
    """By the `-m` of `make test`; pytest leaves tests out after it was asked for their groups."""
    return any(item.get_closest_marker(name) is not None for name in ("full", "gpu"))


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])
