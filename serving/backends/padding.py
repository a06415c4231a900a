"""Sequences of different lengths as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Source


def pad(sources: Sequence[Source], pad_id: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """[rows, longest] ids, or [rows, longest, width] features, and a mask that is true where there is something."""
    longest = max(map(len, sources))
    first = sources[0]
    if isinstance(first, np.ndarray):
        ids: NDArray[Any] = np.zeros((len(sources), longest, first.shape[1]), np.float32)
    else:
        ids = np.full((len(sources), longest), pad_id, np.int64)
    mask = np.zeros((len(sources), longest), np.bool_)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
        mask[row, : len(source)] = True
    return ids, mask


def score_feeds(
    sources: Sequence[Source] | None, targets: Sequence[Source], labels: Sequence[Source], pad_id: int
) -> dict[str, NDArray[Any]]:
    """The score graph's inputs; a language model has no sources."""
    feeds: dict[str, NDArray[Any]] = {"target": pad(targets, pad_id)[0], "labels": pad(labels, pad_id)[0]}
    if sources is not None:
        feeds["source"], feeds["source_mask"] = pad(sources, pad_id)
    return feeds
