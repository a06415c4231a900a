"""Sequences of different lengths as one array, and steps of different sizes as one of a few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Source, StepInputs


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


def padded_count(count: int, most: int) -> int:
    """0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: the first that is not less."""
    if count == 0:
        return 0
    size = 1 << (count - 1).bit_length()
    if count <= size * 3 // 4 and size > 2:
        size = size * 3 // 4
    return max(count, min(size, most))


def padded_step(inputs: StepInputs, batch: int) -> StepInputs:
    """The same step with so many requests, of which the last do nothing; and with samples and reports repeated until
    there is one of a few numbers of them: a sample that is drawn twice is the same one."""
    missing = batch - len(inputs.forced)
    beams = inputs.edit_index.shape[1]

    def repeated(rows: NDArray[Any]) -> NDArray[Any]:
        more = padded_count(len(rows), batch * beams) - len(rows)
        return np.concatenate([rows, np.repeat(rows[-1:], more, axis=0)]) if more else rows

    def extended(rows: NDArray[Any], value: float) -> NDArray[Any]:
        more = np.full((missing, *rows.shape[1:]), value, rows.dtype)
        return np.concatenate([rows, more]) if missing else rows

    return StepInputs(
        extended(inputs.forced, -1),
        extended(inputs.edit_index, 0),
        extended(inputs.edit_scale, 1),
        extended(inputs.edit_add, 0),
        repeated(inputs.sample_rows),
        repeated(inputs.sampling),
        repeated(inputs.report_rows),
    )
