"""A version's graphs in another precision: read back, passed through, and written again with their weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from converters.export import ExportedFiles
from converters.passes.int8 import quantise_weights
from converters.weights import WEIGHTS_FILE, WeightStore, restore_full_precision, sha256_of
from serving.errors import ParityFailure
from serving.manifest import File, Weights

INT8_LIMIT = 0.5  # rounding moves log-probabilities of random words by a few hundredths; a mistake by far more
_EXAMPLE, _LENGTH = {"B": 8}, 12  # sizes of the axes that the probe leaves open


@dataclass(frozen=True)
class Int8Loss:
    """What 8-bit weights changed in the log-probabilities of random targets, against the float32 graph."""

    mean_log_prob_difference: float
    max_log_prob_difference: float


def to_int8(folder: Path, files: ExportedFiles, words: int) -> tuple[ExportedFiles, Int8Loss]:
    """Replaces the float graphs and weights of an unfinished version by their 8-bit form. Every id below `words`
    is a word on either side."""
    graphs = {name: File.model_validate(graph) for name, graph in files.graphs.model_dump().items() if graph}
    before = _random_scores(folder / graphs["score"].file, words)
    # Everything is read before anything is written: the old weights are mapped from the file that is replaced.
    models = {name: ir.load(folder / graph.file) for name, graph in graphs.items()}
    unfinished = folder / f"{WEIGHTS_FILE}.int8"
    with unfinished.open("wb") as file:
        store = WeightStore(file)
        for model in models.values():
            restore_full_precision(model)
            quantise_weights(model)
            store.move_out(model)
        file.flush()
        os.fsync(file.fileno())
    weights = folder / WEIGHTS_FILE
    unfinished.rename(weights)
    for name, model in models.items():
        path = folder / graphs[name].file
        ir.save(model, path)
        graphs[name] = File(file=path.name, sha256=sha256_of(path))
    difference = np.abs(_random_scores(folder / graphs["score"].file, words) - before)
    loss = Int8Loss(float(difference.mean()), float(difference.max()))
    if not loss.mean_log_prob_difference <= INT8_LIMIT:  # also catches a NaN
        raise ParityFailure(
            f"8-bit weights move log-probabilities by {loss.mean_log_prob_difference:.3g} on average, "
            f"and {INT8_LIMIT:g} is the limit: this model needs --precision float32"
        )
    return (
        ExportedFiles(
            files.graphs.model_copy(update=graphs),
            Weights(file=weights.name, sha256=sha256_of(weights), bytes=weights.stat().st_size),
        ),
        loss,
    )


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
