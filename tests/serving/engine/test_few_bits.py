"""The engine over graphs with 8-bit and 4-bit weights: the same promises as in full precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from beamline.serving.contract.manifest import LARGEST_PAIR, StateKind
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Result
from beamline.serving.errors import ComputeError
from beamline.serving.rewrites.int8 import row_levels
from tests.serving.engine.test_engine import LONG, crowd, is_same
from tests.support.compiled import compile_version
from tests.support.engines import decode, make_engine, results, slot_views
from tests.support.few_bits import calibrated, in_few_bits
from tests.support.harness import Harness
from tests.support.marian_shape import MarianShape
from tests.support.ties import TIE

MADE: dict[str, Callable[[MarianShape, Path], MarianShape]] = {
    "int8": lambda model, folder: in_few_bits(model, folder, "int8"),
    "calibrated": calibrated,
    "int4": lambda model, folder: in_few_bits(model, folder, "int4"),
}


@pytest.fixture(scope="module", params=["int8", "calibrated", pytest.param("int4", marks=pytest.mark.full)])
def model(
    plain_model: MarianShape, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> MarianShape:
    folder = tmp_path_factory.mktemp(request.param)
    return MADE[request.param](plain_model, folder)


def test_every_graph_says_that_rows_may_have_eight_bits(model: MarianShape) -> None:
    for file in model.folder.glob("*.onnx"):
        said = {entry.key: entry.value for entry in onnx.load(file, load_external_data=False).metadata_props}
        assert row_levels(int(said[LARGEST_PAIR])) == 127


def assert_alone_is_together(model: MarianShape, seed: int, count: int, slots: int, stagger: int) -> None:
    requests = crowd(count, seed)
    alone = [results(decode(make_engine(model.folder, model.manifest), [request]))[0] for request in requests]
    together = results(decode(make_engine(model.folder, model.manifest, slots=slots), requests, stagger))
    pairs = zip(together, alone, strict=True)
    changed = [pair for pair in pairs if not is_same(*pair) and not lost_only_one(*pair)]
    assert len(changed) <= 1
    assert all(kept_its_best(found, expected) for found, expected in changed)


def lost_only_one(found: Result, expected: Result) -> bool:
    """What is a tie in full precision, a difference of 1e-7 from another order of additions, can be a whole level after
    rounding. So a search may drop another one of several beams at its edge; all that it keeps is as it was."""
    mine, other = ({each.tokens: each.score for each in result.hypotheses} for result in (found, expected))
    both = mine.keys() & other.keys()
    return len(mine) > 1 and len(both) >= len(mine) - 1 and all(abs(mine[each] - other[each]) < TIE for each in both)


def kept_its_best(found: Result, expected: Result) -> bool:
    """Such a level can also make a wide search go on where it would have ended, and find more behind the best. That is
    rare: of the 1,440 long searches in 4 bits that are compared here, it happened to one."""
    best, other = found.hypotheses[0], expected.hypotheses[0]
    return len(found.hypotheses) > 1 and best.tokens == other.tokens and abs(best.score - other.score) < TIE


def test_an_answer_does_not_depend_on_its_neighbours(model: MarianShape) -> None:
    assert_alone_is_together(model, seed=0, count=16, slots=8, stagger=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("slots", "stagger"), [(5, 2), (16, 1), (32, 0)])
def test_an_answer_does_not_depend_on_its_neighbours_at_length(
    model: MarianShape, seed: int, slots: int, stagger: int
) -> None:
    assert_alone_is_together(model, seed=200 + seed, count=48, slots=slots, stagger=stagger)


def test_it_says_nearly_what_full_precision_says(model: MarianShape, plain_model: MarianShape) -> None:
    """Teacher-forced, so that one close decision does not send the two along different ways."""
    requests = crowd(16, seed=3)
    answers = results(decode(make_engine(plain_model.folder, plain_model.manifest), requests))
    exact, rounded = make_engine(plain_model.folder, plain_model.manifest), make_engine(model.folder, model.manifest)
    start = model.manifest.vocabulary.start_id
    differences: list[float] = []
    for (source, _), answer in zip(requests, answers, strict=True):
        words = answer.hypotheses[0].tokens
        pair = [engine._backend.score(source, words, start) for engine in (exact, rounded)]
        differences += np.abs(pair[0].token_log_probs - pair[1].token_log_probs).tolist()
    assert 0 < np.mean(differences) < {"int8": 0.1, "int4": 0.5}[model.manifest.precision]


def test_its_steps_say_nearly_what_full_precision_says(model: MarianShape, plain_model: MarianShape) -> None:
    """One step from the start, where both have decided the same things so far."""
    first = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=1)
    sources = [source for source, _ in crowd(16, seed=4)]
    answers = [
        results(decode(make_engine(each.folder, each.manifest), [(source, first) for source in sources]))
        for each in (plain_model, model)
    ]
    pairs = [(a.hypotheses[0], b.hypotheses[0]) for a, b in zip(*answers, strict=True)]
    differences = [abs(a.score - b.score) for a, b in pairs if a.tokens == b.tokens]
    assert len(differences) > len(pairs) / 2
    assert 0 < np.mean(differences) < 0.5


def assert_poison_fails_its_request_alone(model: MarianShape, tensor: str, head: int | slice) -> None:
    harness = Harness(model, slots=3)
    numbers = [harness.submit([5, 6, 7 + n], LONG) for n in range(3)]
    for _ in range(4):
        harness.step()
    slot_views(harness.backend)[tensor][1, head, 0] = np.nan
    harness.step()
    assert isinstance(harness.answers[numbers[1]], ComputeError)
    harness.finish()
    assert not any(isinstance(harness.answers[number], Exception) for number in (numbers[0], numbers[2]))


@pytest.mark.parametrize("head", [0, 3])
def test_poison_in_one_head_fails_its_request_alone(model: MarianShape, head: int) -> None:
    """A maximum would step over it: the row's other heads are numbers."""
    assert_poison_fails_its_request_alone(model, "cache_value_0", head)


def test_poison_in_a_source_fails_its_request_alone(model: MarianShape) -> None:
    """It goes through the encoder's memory, which attention reads."""
    assert_poison_fails_its_request_alone(model, "cross_key_1", slice(None))


def test_its_graphs_compile_for_tensorrt(model: MarianShape) -> None:
    """As they are on disk: TensorRT takes DequantizeLinear, and nothing of what the CPU makes of it."""
    (plan,) = compile_version(model.folder, model.manifest, only="step")["step"]
    assert plan.layers["DEQUANTIZE"] > 0


def test_every_large_matrix_is_small_on_disk(model: MarianShape, plain_model: MarianShape) -> None:
    """And nothing but the standard's operators: the fast ones are the server's business."""
    types = set()
    for file in (model.manifest.graphs.encoder, model.manifest.graphs.step, model.manifest.graphs.score):
        assert file is not None
        graph = onnx.load(Path(model.folder) / file.file, load_external_data=False).graph
        assert {node.domain for node in graph.node} == {""}
        floats = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2}
        assert not [node.name for node in graph.node if node.op_type == "MatMul" and floats.intersection(node.input)]
        stored = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        types |= {tensor.data_type for tensor in graph.initializer if tensor.name in stored}
    int8, int4 = onnx.TensorProto.INT8, onnx.TensorProto.INT4
    assert types == {"int8": {int8}, "int4": {int8, int4}}[model.manifest.precision]  # 8 bits where words are looked up
    assert model.manifest.weights.bytes < 0.5 * plain_model.manifest.weights.bytes
    assert model.manifest.tensors(StateKind.CACHE) == plain_model.manifest.tensors(StateKind.CACHE)
