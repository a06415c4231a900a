"""A version's graphs with 8-bit weights, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from converters.lowering import take_over, write_lowered
from converters.passes.int8 import quantise_weights
from converters.weights import restore_full_precision
from serving.errors import ParityFailure
from serving.manifest import Manifest, StateTensor

INT8_LIMIT = 0.5  # rounding moves log-probabilities of random words by a few hundredths; a mistake by far more
_WORK = ".int8"
_EXAMPLE, _LENGTH = {"B": 8}, 12  # sizes of the axes that the probe leaves open


@dataclass(frozen=True)
class Int8Loss:
    """What 8-bit weights changed in the log-probabilities of random targets, against the float32 graph."""

    mean_log_prob_difference: float
    max_log_prob_difference: float


def to_int8(folder: Path, manifest: Manifest) -> tuple[Manifest, Int8Loss]:
    """Replaces the float graphs and weights of an unfinished version by their 8-bit form."""
    words = min(manifest.vocabulary.source_size, manifest.vocabulary.target_size)  # an id below is one on either side
    score = manifest.graphs.score.file
    work = folder / _WORK
    quantised = write_lowered(folder, manifest, work, "int8", _quantise, manifest.state)
    difference = np.abs(_random_scores(work / score, words) - _random_scores(folder / score, words))
    loss = Int8Loss(float(difference.mean()), float(difference.max()))
    if not loss.mean_log_prob_difference <= INT8_LIMIT:  # also catches a NaN
        raise ParityFailure(
            f"8-bit weights move log-probabilities by {loss.mean_log_prob_difference:.3g} on average, "
            f"and {INT8_LIMIT:g} is the limit: this model needs --precision float32"
        )
    take_over(work, folder)
    return quantised, loss


def _quantise(model: ir.Model, state: Sequence[StateTensor]) -> None:
    """What lives in a slot stays as it is: only weights change."""
    restore_full_precision(model)
    quantise_weights(model)


def _random_scores(path: Path, words: int) -> NDArray[np.float32]:
    """The teacher-forced log-probabilities of the same random inputs, whatever the precision."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    for argument in session.get_inputs():
        shape = [size if isinstance(size, int) else _EXAMPLE.get(size, _LENGTH) for size in argument.shape]
        if argument.type == "tensor(int64)":
            feeds[argument.name] = random.integers(0, words, shape)
        elif argument.type == "tensor(bool)":
            feeds[argument.name] = np.ones(shape, np.bool_)
        else:
            feeds[argument.name] = random.standard_normal(shape).astype(np.float32)
    scores: NDArray[np.float32] = session.run(["token_log_probs"], feeds)[0]
    return scores
