"""The GPU backends over an emulator: the same answers as on the CPU, no waiting inside a step, and refusals in time."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from beamline.converters.tensorrt import profiles
from beamline.serving.backends import gpu
from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.backends.device import DeviceTensor, GraphRunner
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.one_shot import GpuGraphs
from beamline.serving.backends.onnxruntime_cpu import CpuGraphs
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner, provider_options
from beamline.serving.backends.pooled import PooledGraphBackend
from beamline.serving.backends.tensorrt import TensorRtRunner
from beamline.serving.contract.backend import Shape, Start, StepInputs
from beamline.serving.contract.manifest import PooledManifest, StateKind, read_any_manifest, read_manifest
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Result, Scores
from beamline.serving.engine.request import Request
from beamline.serving.errors import ComputeError, InvalidRequest, ModelError, OutOfMemory, Overloaded
from tests.support.emulated_device import EmulatedDevice, Refused
from tests.support.emulator import EmulatedContext, EmulatedRuntime, emulated_backend, write_emulated_plans
from tests.support.engines import decode, make_engine, results, slot_views, step
from tests.support.language_models import ConvertedLanguageModel
from tests.support.marian_shape import MAX_LENGTH, PAD, MarianShape
from tests.support.ties import same_or_tie

BEAM = DecodingOptions(beam_size=4, num_hypotheses=4, max_length=MAX_LENGTH)
BUCKETS = (48, 128)


@pytest.fixture(scope="module")
def planned(plain_model: MarianShape, tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    """With cards of plans that only the emulator takes."""
    folder = linked(plain_model.folder, tmp_path_factory.mktemp("planned"))
    write_emulated_plans(folder, plain_model.manifest, BUCKETS)
    return replace(plain_model, folder=folder)


def linked(version: Path, folder: Path) -> Path:
    """The same version elsewhere, where plans can be written beside it."""
    for file in version.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    return folder


def nothing(batch: int, beams: int) -> StepInputs:
    none = np.zeros((batch, beams, 0), np.float32)
    return StepInputs(np.full(batch, -1), none.astype(np.int64), none, none)


def crowd(count: int, seed: int) -> list[tuple[list[int], DecodingOptions]]:
    chance = random.Random(seed)
    choices = (
        BEAM,
        replace(BEAM, beam_size=1, num_hypotheses=1),
        replace(BEAM, beam_size=8, num_hypotheses=2, min_length=30),
        replace(BEAM, beam_size=2, num_hypotheses=2, no_repeat_ngram_size=2),
        replace(BEAM, repetition_penalty=1.5, suppress_tokens=tuple(range(8, 40))),
        replace(BEAM, prefix=(20, 21), return_alignment=True),
    )
    return [
        ([chance.randrange(2, PAD) for _ in range(chance.randint(1, 60))], chance.choice(choices)) for _ in range(count)
    ]


def emulated_engine(model: MarianShape, slots: int, records: bool = True) -> tuple[Engine, EmulatedDevice]:
    backend, runner, device = emulated_backend(model.folder, model.manifest, records)
    plan = replace(Plan.of(model.manifest, slots), cache_buckets=runner.plans.cache_buckets)
    return Engine(model.manifest, backend, plan, max_queue=1000), device


def cuda_runner_engine(model: MarianShape, slots: int) -> Engine:
    """The CUDA provider's runner, with the CPU provider behind it."""
    device = EmulatedDevice()
    runner = OnnxRuntimeCudaRunner(model.folder, model.manifest, 0, 0, place="cpu", launch=device.launch)
    return Engine(
        model.manifest, GpuBackend(model.manifest, device, runner), Plan.of(model.manifest, slots), max_queue=1000
    )


@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt without recording", "cuda"])
def test_the_same_answers_as_on_the_cpu(planned: MarianShape, kind: str) -> None:
    requests = crowd(16, seed=1)
    expected = results(decode(make_engine(planned.folder, planned.manifest, slots=6), requests))
    if kind == "cuda":
        engine = cuda_runner_engine(planned, 6)
    else:
        engine, device = emulated_engine(planned, 6, records=kind == "tensorrt")
    found = results(decode(engine, requests, stagger=2))
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine.hypotheses, other.hypotheses, strict=True):
            assert same_or_tie(a.tokens, a.token_log_probs, b.tokens, b.token_log_probs)
            assert (a.alignment is None) == (b.alignment is None)
    if kind == "tensorrt":
        assert device.replayed > device.recorded > 0
    if kind == "tensorrt without recording":
        assert device.recorded == 0


def test_a_step_waits_once_and_only_when_it_is_collected(planned: MarianShape) -> None:
    backend, _, device = emulated_backend(planned.folder, planned.manifest)
    backend.allocate(4, Shape(4, 8, 128, 32))
    backend.resize(Shape(2, 3, 48, 8), 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
        backend.place(slot, memory, Start(PAD, 3, independent=False))
    assert device.waits == 0
    for _ in range(5):
        backend.launch(nothing(2, 3))
        backend.launch(nothing(2, 3))
        before = device.waits
        with pytest.raises(ComputeError, match="in flight"):
            backend.launch(nothing(2, 3))
        assert device.waits == before
        backend.collect()
        backend.collect()
        assert device.waits == before + 2


def test_a_launch_that_fails_leaves_its_half_alone(planned: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the memory that uploads come from: its own is perhaps still to be read."""
    backend, _, _ = emulated_backend(planned.folder, planned.manifest)
    backend.allocate(2, Shape(2, 4, 128, 32))
    backend.resize(Shape(2, 4, 48, 8), 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
        backend.place(slot, memory, Start(PAD, 4, independent=False))
    halves: list[int] = []
    upload = backend._inputs.upload

    def noted(tensors: Any, values: Any, turn: int) -> None:
        halves.append(turn)
        upload(tensors, values, turn)

    def refused(*arguments: object) -> None:
        raise OutOfMemory("no room for what it computes")

    monkeypatch.setattr(backend._inputs, "upload", noted)
    backend.launch(nothing(2, 4))
    with monkeypatch.context() as failing:
        failing.setattr(backend, "_carry", refused)
        with pytest.raises(OutOfMemory):
            backend.launch(nothing(2, 4))
    backend.collect()
    backend.launch(nothing(2, 4))
    backend.collect()
    assert halves == [0, 1, 0]


def test_two_steps_on_their_way_give_what_one_after_the_other_gives(planned: MarianShape) -> None:
    def steps(ahead: bool) -> list[list[list[float]]]:
        backend, _, _ = emulated_backend(planned.folder, planned.manifest)
        backend.allocate(2, Shape(2, 4, 128, 32))
        backend.resize(Shape(2, 4, 48, 8), 0)
        for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
            backend.place(slot, memory, Start(PAD, 4, independent=False))
        found = []
        backend.launch(nothing(2, 4))
        for _ in range(8):
            if ahead:
                backend.launch(nothing(2, 4))
                found.append(backend.collect().candidate_scores.tolist())
            else:
                found.append(backend.collect().candidate_scores.tolist())
                backend.launch(nothing(2, 4))
        return found

    assert steps(ahead=True) == steps(ahead=False)


def test_a_recording_keeps_the_context_that_it_was_made_of(planned: MarianShape) -> None:
    """The emulator refuses a repetition of work whose context is gone."""
    backend, _, device = emulated_backend(planned.folder, planned.manifest)
    backend.allocate(2, Shape(2, 4, 128, 32))
    backend.resize(Shape(2, 4, 48, 8), 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
        backend.place(slot, memory, Start(PAD, 4, independent=False))
    for _ in range(6):
        backend.run(nothing(2, 4))
        gc.collect()
    assert device.recorded == 1
    assert device.replayed >= 3


def edited(batch: int, beams: int, edits: int) -> StepInputs:
    """Lists that change nothing, of so many words."""
    shape = (batch, beams, edits)
    return StepInputs(
        np.full(batch, -1), np.zeros(shape, np.int64), np.ones(shape, np.float32), np.zeros(shape, np.float32)
    )


def test_a_launch_stays_until_its_step_is_over(planned: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for long lists is made and given back while a step is in flight that knows only the old room. The emulator
    refuses work whose execution context is gone."""
    monkeypatch.setattr(gpu, "_SHORT_LISTS", 2)
    rooms: set[int] = set()

    def scores(ahead: bool) -> list[list[list[float]]]:
        backend, _, _ = emulated_backend(planned.folder, planned.manifest)
        backend.allocate(2, Shape(2, 4, 128, 32))
        backend.resize(Shape(2, 4, 48, 8), 0)
        for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
            backend.place(slot, memory, Start(PAD, 4, independent=False))
        found = []
        for edits in (0, 1, 600, 0, 0, 0, 0, 600, 600):
            backend.launch(edited(2, 4, edits))
            rooms.add(backend._inputs.nbytes)
            if not ahead or len(backend._in_flight) > 1:
                found.append(backend.collect().candidate_scores.tolist())
        while backend._in_flight:
            found.append(backend.collect().candidate_scores.tolist())
        return found

    assert scores(ahead=True) == scores(ahead=False)
    assert len(rooms) == 2


def test_a_launch_stays_until_a_failed_step_is_waited_for(planned: MarianShape) -> None:
    backend, _, _ = emulated_backend(planned.folder, planned.manifest)
    backend.allocate(2, Shape(2, 4, 128, 32))
    backend.resize(Shape(2, 4, 48, 8), 0)
    backend.place(0, backend.encode([[5, 6]])[0], Start(PAD, 4, independent=False))
    backend.launch(edited(1, 4, 0))
    backend.launch(edited(1, 4, 600))
    backend.forget_launches()
    backend.run(edited(1, 4, 0))


def test_a_context_stays_until_its_last_run_is_over(planned: MarianShape) -> None:
    """Also where nobody wants the results, and the model is unloaded: no step behind it was waited for."""
    backend, runner, device = emulated_backend(planned.folder, planned.manifest)
    backend.encode([[5, 6], [7, 8, 9]])
    del backend, runner
    device.finish()  # it refuses work whose execution context is gone


SHARED = 4  # contexts


def with_context_limit(model: MarianShape, most: int | None) -> tuple[GpuBackend, EmulatedRuntime, EmulatedDevice]:
    """Two requests are in their slots. The encoder's plan and the step's three have a context each that launches
    share."""
    backend, runner, device = emulated_backend(model.folder, model.manifest)
    runtime = runner._runtime
    assert isinstance(runtime, EmulatedRuntime)
    assert len(runtime.alive) == SHARED
    runtime.most_contexts = most
    backend.allocate(2, Shape(2, 4, 128, 32))
    backend.resize(Shape(2, 2, 48, 8), 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
        backend.place(slot, memory, Start(PAD, 2, independent=False))
    return backend, runtime, device


def test_a_context_of_its_own_is_made_for_a_shape_that_recurs(planned: MarianShape) -> None:
    backend, runtime, device = with_context_limit(planned, None)
    for edits in range(6):
        backend.run(edited(2, 2, edits))
    assert (runtime.contexts, device.recorded) == (SHARED, 0)
    for _ in range(3):
        backend.run(edited(2, 2, 5))
    assert (runtime.contexts, device.recorded, device.replayed) == (SHARED + 1, 1, 1)


@pytest.mark.parametrize(("most", "replayed"), [(None, True), (SHARED + 2, True), (SHARED + 1, True), (SHARED, False)])
def test_too_little_memory_for_contexts_refuses_nobody(planned: MarianShape, most: int | None, replayed: bool) -> None:
    """Those that were not used for the longest time go, and at last launches share one. Steps run ahead."""
    backend, runtime, device = with_context_limit(planned, most)
    found = []
    for edits in (*[0, 0, 1] * 2, 1, 2, 2, 2, 2, 0, 0, 0, 0):
        backend.launch(edited(2, 2, edits))
        if len(backend._in_flight) > 1:
            found.append(backend.collect().candidate_scores.tolist())
    found.append(backend.collect().candidate_scores.tolist())
    assert (device.replayed > 0) == replayed
    free, _, _ = with_context_limit(planned, None)
    assert found == [free.run(nothing(2, 2)).candidate_scores.tolist() for _ in found]
    if most is not None:
        assert len(runtime.alive) == most


def test_contexts_make_room_for_another_plan(planned: MarianShape) -> None:
    backend, runtime, _ = with_context_limit(planned, SHARED + 1)
    for _ in range(3):
        backend.run(nothing(2, 2))
    assert len(runtime.alive) == SHARED + 1
    backend.resize(Shape(2, 2, 128, 8), 2)
    for _ in range(4):
        backend.run(nothing(2, 2))
    assert len(runtime.alive) == SHARED + 1  # that of the short plan went


def test_contexts_that_launches_share_are_made_at_load(planned: MarianShape) -> None:
    """Not when the first request needs a longer cache: by then there may be no memory for them."""
    device = EmulatedDevice()
    runtime = EmulatedRuntime(device, planned.folder)
    runtime.most_contexts = SHARED - 1
    with pytest.raises(OutOfMemory):
        TensorRtRunner(planned.folder, planned.manifest, device, runtime)


def test_a_context_that_was_bound_by_half_is_bound_anew(planned: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, _ = with_context_limit(planned, SHARED)
    backend.run(nothing(2, 2))
    expected = backend.run(nothing(2, 2)).candidate_scores.copy()
    again, _, _ = with_context_limit(planned, SHARED)
    again.run(nothing(2, 2))
    set_address = EmulatedContext.set_address

    def picky(context: EmulatedContext, name: str, address: int) -> bool:
        return name != "scores" and set_address(context, name, address)

    monkeypatch.setattr(EmulatedContext, "set_address", picky)
    with pytest.raises(ComputeError, match="refused the address of scores"):
        again.run(edited(2, 2, 1))
    again.forget_launches()
    monkeypatch.setattr(EmulatedContext, "set_address", set_address)
    np.testing.assert_array_equal(again.run(nothing(2, 2)).candidate_scores, expected)


def big_launches_fail(runner: GraphRunner, rows: int) -> None:
    """There is too little memory for a step of so many."""
    prepare = runner.prepare

    def limited(graph: str, tensors: dict[str, DeviceTensor], keep: bool = False) -> object:
        if graph == "step" and tensors["tokens"].shape[0] >= rows:
            raise OutOfMemory("too many rows")
        return prepare(graph, tensors, keep)

    runner.prepare = limited  # type: ignore[method-assign, assignment]


def test_nobody_is_refused_for_idle_rows(planned: MarianShape) -> None:
    """A step of seven is padded to eight, for which there may be too little memory."""
    requests = [([5, 6, 7 + n], replace(BEAM, min_length=20, max_length=24)) for n in range(9)]
    expected = results(decode(make_engine(planned.folder, planned.manifest), requests))
    backend, runner, _ = emulated_backend(planned.folder, planned.manifest)
    big_launches_fail(runner, 8)
    plan = replace(Plan.of(planned.manifest, 16), cache_buckets=runner.plans.cache_buckets)
    engine = Engine(planned.manifest, backend, plan, max_queue=100)
    answers = decode(engine, requests)
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert [type(error) for error in refused] == [Overloaded] * 2
    for found, wanted in zip(answers, expected, strict=True):
        if isinstance(found, Result):
            assert [each.tokens for each in found.hypotheses] == [each.tokens for each in wanted.hypotheses]


def test_who_needs_the_longest_cache_is_refused_where_nobody_has_just_come(planned: MarianShape) -> None:
    backend, runner, _ = emulated_backend(planned.folder, planned.manifest)
    prepare = runner.prepare

    def limited(graph: str, tensors: dict[str, DeviceTensor], keep: bool = False) -> object:
        if graph == "step" and tensors["ancestry"].shape[2] > 48:
            raise OutOfMemory("too long a cache")
        return prepare(graph, tensors, keep)

    runner.prepare = limited  # type: ignore[method-assign, assignment]
    plan = replace(Plan.of(planned.manifest, 8), cache_buckets=runner.plans.cache_buckets)
    engine = Engine(planned.manifest, backend, plan, max_queue=100)
    long, short = replace(BEAM, min_length=MAX_LENGTH - 1), replace(BEAM, max_length=8)
    answers = decode(engine, [([5, 6, 7 + number % 9], short if number else long) for number in range(41)], stagger=1)
    assert isinstance(answers[0], Overloaded)
    assert len(results(answers[1:])) == 40


def test_activations_of_all_plans_share_the_memory_of_the_largest(planned: MarianShape) -> None:
    """Whichever comes first; the score plan, which is loaded when it is needed, gets more where it takes more."""
    backend, runner, device = emulated_backend(planned.folder, planned.manifest)
    sizes = {key: runner._runtime.load(Path(), card).activation_bytes for key, card in runner.plans.cards.items()}
    score = sizes.pop(("score", None))
    assert len(set(sizes.values())) > 2
    assert device.allocated_bytes == max(sizes.values()) < score
    backend.allocate(2, Shape(2, 4, 128, 32))
    backend.resize(Shape(2, 4, 48, 8), 0)
    backend.place(0, backend.encode([[5, 6]])[0], Start(PAD, 4, independent=False))
    backend.run(nothing(1, 4))
    before = device.allocated_bytes
    for _ in range(2):
        backend.score_batch([[5, 6, 7]], [[PAD, 8]], [[8, 9]])
        backend.run(nothing(1, 4))  # with the room that it has
    gc.collect()
    assert device.allocated_bytes == before + score


def test_slots_are_as_on_the_host(planned: MarianShape) -> None:
    """The same calls in the same order on both: every arena holds the same, as far as anybody looks."""
    caches = {tensor.name for tensor in planned.manifest.tensors(StateKind.CACHE)}
    host = CpuBackend(planned.folder, planned.manifest, threads=1)
    backend, _, _ = emulated_backend(planned.folder, planned.manifest)
    chance = random.Random(3)

    def same() -> None:
        on_host = slot_views(host)
        visible = np.any(on_host["ancestry"][: shape.batch], 1, keepdims=True)  # [B, 1, C]: of some beam
        for name, view in slot_views(backend).items():
            mine, theirs = view[: shape.batch], on_host[name][: shape.batch]
            if name in caches:  # the rest of it may be anything that is finite
                assert np.isfinite(mine).all()
                mine, theirs = (each * visible[..., None] for each in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)

    both: tuple[Any, Any] = (host, backend)
    for each in both:
        each.allocate(4, Shape(4, 8, 128, 32))
    shape = Shape(3, 3, 48, 16)
    sources = [[chance.randrange(2, PAD) for _ in range(length)] for length in (3, 9, 5)]
    for each in both:
        each.resize(shape, 0)
        for slot, memory in enumerate(each.encode(sources)):
            each.place(slot, memory, Start(PAD, 3 - slot, independent=slot == 2))
    same()
    for each in both:
        for _ in range(6):
            each.run(nothing(3, 3))
    same()
    keep = [0, 1, 4, 5, 6, 9, 11, 12]
    for work in (
        lambda each: each.compact(1, keep),
        lambda each: each.move(2, 0),
        lambda each: each.resize(Shape(3, 5, 128, 32), 3),
        lambda each: each.run(nothing(3, 5)),
        lambda each: each.resize(Shape(3, 4, 48, 16), 3),
        lambda each: each.zero(1),
        lambda each: each.run(nothing(3, 4)),
    ):
        for each in both:
            work(each)
        if backend._shape.beams > 3:
            shape = backend._shape
        same()


def five_of_six(planned: MarianShape) -> GpuBackend:
    """A step of five requests is padded to six: the last slot is idle."""
    backend, _, _ = emulated_backend(planned.folder, planned.manifest)
    backend.allocate(6, Shape(6, 4, 128, 32))
    backend.resize(Shape(5, 4, 48, 8), 0)
    for slot, memory in enumerate(backend.encode([[5, 6, 7 + place] for place in range(5)])):
        backend.place(slot, memory, Start(PAD, 4, independent=False))
    return backend


def test_what_is_not_a_number_stays_with_its_request(planned: MarianShape) -> None:
    """Idle rows compute what the first does, so its NaN is in their caches, too, where the next request would multiply
    it by the zeros of its mask."""
    backend = five_of_six(planned)
    caches = [tensor.name for tensor in planned.manifest.tensors(StateKind.CACHE)]
    for tensor in planned.manifest.tensors(StateKind.MEMORY):
        if tensor.dtype == "float32":
            slot_views(backend)[tensor.name][0] = np.nan
    found = np.isnan(backend.run(nothing(5, 4)).candidate_scores.sum(1))
    assert found.tolist() == [True, False, False, False, False]
    assert any(np.isnan(slot_views(backend)[name][5]).any() for name in caches)  # or this test would show nothing
    backend.zero(0)
    for name in caches:
        assert np.isfinite(slot_views(backend)[name]).all(), name
    backend.resize(Shape(6, 4, 48, 8), 5)
    for slot, memory in zip((0, 5), backend.encode([[8, 9], [9]]), strict=True):
        backend.place(slot, memory, Start(PAD, 4, independent=False))
    for _ in range(3):
        assert not np.isnan(backend.run(nothing(6, 4)).candidate_scores.sum(1)).any()


def test_idle_rows_begin_anew_in_another_layout(planned: MarianShape) -> None:
    """Also where it is one that there was before, and nothing was launched in between: others have lain there."""
    backend = five_of_six(planned)
    backend.run(nothing(5, 4))
    for shape in (Shape(5, 4, 128, 32), Shape(5, 4, 48, 8)):
        backend.resize(shape, 5)
    backend.launch(nothing(5, 4))
    before = slot_views(backend)
    backend.collect()
    for tensor in planned.manifest.tensors(StateKind.MEMORY):
        np.testing.assert_array_equal(before[tensor.name][5], before[tensor.name][0], err_msg=tensor.name)


def test_encoding_keeps_to_what_the_plan_holds(plain_model: MarianShape, tmp_path: Path) -> None:
    """Those who wait are encoded, too: more than there are slots, in as many runs as that takes."""
    linked(plain_model.folder, tmp_path)
    write_emulated_plans(tmp_path, plain_model.manifest, BUCKETS, slots=2)
    backend, runner, _ = emulated_backend(tmp_path, plain_model.manifest)
    assert runner.most("encoder", "B") == 2
    plan = replace(Plan.of(plain_model.manifest, 2), cache_buckets=runner.plans.cache_buckets)
    engine = Engine(plain_model.manifest, backend, plan, max_queue=10)
    runs: list[int] = []
    encode = backend._encode_few

    def noted(sources: Any) -> Any:
        runs.append(len(sources))
        return encode(sources)

    backend._encode_few = noted  # type: ignore[method-assign]
    requests = [
        ([5, 6, number], DecodingOptions(beam_size=2, num_hypotheses=1, max_length=8)) for number in range(7, 12)
    ]
    found = results(decode(engine, requests))
    assert runs == [2, 2, 1]
    alone = [results(decode(make_engine(plain_model.folder, plain_model.manifest), [each]))[0] for each in requests]
    for mine, other in zip(found, alone, strict=True):
        best, theirs = mine.hypotheses[0], other.hypotheses[0]
        assert same_or_tie(best.tokens, best.token_log_probs, theirs.tokens, theirs.token_log_probs)


def test_scoring_keeps_to_what_the_plan_holds(
    plain_model: MarianShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of twenty tokens: more texts are several runs, and a longer one is refused in a sentence."""
    linked(plain_model.folder, tmp_path)
    words = plain_model.manifest.vocabulary.target_size
    monkeypatch.setattr(profiles, "SCORE_VALUES", 20 * words)
    write_emulated_plans(tmp_path, plain_model.manifest, BUCKETS)
    backend, runner, _ = emulated_backend(tmp_path, plain_model.manifest)
    assert (runner.most("score", "B"), runner.most("score", "T")) == (1, 20)
    host = CpuBackend(plain_model.folder, plain_model.manifest, threads=1)
    targets = [[PAD, *range(5, 5 + length)] for length in (3, 19, 1, 7, 12)]
    both = [each.score_batch([[5, 6, 7]] * 5, targets, targets) for each in (backend, host)]
    for mine, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    plan = replace(Plan.of(plain_model.manifest, 4), cache_buckets=runner.plans.cache_buckets)
    engine = Engine(plain_model.manifest, backend, plan, max_queue=10)
    found: list[object] = []
    for length in (21, 8):
        target = (PAD,) * length
        engine.submit(Request((5, 6), on_output=found.append, target=target, labels=target))
    while engine.busy:
        step(engine)
    refused = next(answer for answer in found if isinstance(answer, Exception))
    assert (type(refused), str(refused)) == (
        InvalidRequest,
        "the text has 21 tokens; on this device 20 can be scored at most",
    )
    assert [len(answer.log_probs) for answer in found if isinstance(answer, Scores)] == [8]


def test_prompts_are_taken_in_by_several_runs(
    language_model: ConvertedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes in two prompts at once, and sixteen tokens of each."""
    monkeypatch.setattr(profiles, "_PROMPTS", 2)
    monkeypatch.setattr(profiles, "_PROMPT_TOKENS", 16)
    folder = linked(language_model.folder, tmp_path)
    manifest = read_manifest(folder)
    write_emulated_plans(folder, manifest, BUCKETS)
    backend, runner, _ = emulated_backend(folder, manifest)
    assert (runner.most("prefill", "B"), runner.most("prefill", "Q")) == (2, 16)
    chance = random.Random(0)
    words = manifest.vocabulary.target_size
    options = DecodingOptions(beam_size=2, num_hypotheses=1, max_length=12)
    requests = [([chance.randrange(3, words) for _ in range(count)], options) for count in (40, 3, 70, 17, 33)]
    expected = results(decode(make_engine(folder, manifest, slots=5), requests))
    plan = replace(Plan.of(manifest, 5), cache_buckets=runner.plans.cache_buckets)
    found = results(decode(Engine(manifest, backend, plan, max_queue=10), requests))
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine.hypotheses, other.hypotheses, strict=True):
            assert same_or_tie(a.tokens, a.token_log_probs, b.tokens, b.token_log_probs)


@pytest.mark.parametrize("kind", ["tensorrt", "cuda"])
def test_a_classifier_on_a_gpu(pooled_repository: Path, tmp_path: Path, kind: str) -> None:
    folder = pooled_repository / "mood" / "1"
    manifest = read_any_manifest(folder)
    assert isinstance(manifest, PooledManifest)
    device = EmulatedDevice()
    runner: GraphRunner
    if kind == "cuda":
        runner = OnnxRuntimeCudaRunner(folder, manifest, 0, 0, place="cpu", launch=device.launch)
    else:
        planned = linked(folder, tmp_path)
        write_emulated_plans(planned, manifest, slots=4)
        runner = TensorRtRunner(planned, manifest, device, EmulatedRuntime(device, planned))
        with pytest.raises(ModelError, match="the plans hold 4 requests at once"):
            PooledGraphBackend(manifest, GpuGraphs(device, runner), rows=5)
    chance = random.Random(0)
    sources = [[chance.randrange(4, 90) for _ in range(length)] for length in (9, 1, 30, 4)]
    expected = PooledGraphBackend(manifest, CpuGraphs(folder, manifest, threads=1), rows=4).run(sources)
    found = PooledGraphBackend(manifest, GpuGraphs(device, runner), rows=4).run(sources)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6, err_msg=name)


def test_options_of_the_cuda_provider() -> None:
    """Those of a model's serving.toml are added to ours, and win."""
    found = provider_options(1, 99, {"gpu_mem_limit": "1000", "use_tf32": "1"})
    assert (found["device_id"], found["user_compute_stream"], found["gpu_mem_limit"]) == ("1", "99", "1000")
    assert (found["use_tf32"], provider_options(1, 99)["use_tf32"]) == ("1", "0")


class TestRefusals:
    """What TensorRT would refuse is refused by us in a sentence, or by the emulator."""

    def tensors(self, planned: MarianShape) -> tuple[GpuBackend, dict[str, DeviceTensor], object]:
        backend, runner, _ = emulated_backend(planned.folder, planned.manifest)
        backend.allocate(2, Shape(2, 4, 48, 16))
        backend.resize(Shape(2, 4, 48, 16), 0)
        seen: dict[str, DeviceTensor] = {}
        prepare = runner.prepare

        def spy(graph: str, tensors: dict[str, DeviceTensor], keep: bool = False) -> object:
            seen.update(tensors)
            return prepare(graph, tensors, keep)

        runner.prepare = spy  # type: ignore[method-assign, assignment]
        backend.run(nothing(2, 4))
        runner.prepare = prepare  # type: ignore[method-assign]
        return backend, seen, runner

    @pytest.mark.parametrize(
        ("name", "change", "sentence"),
        [
            ("tokens", {"shape": (33, 4)}, "the plan takes"),
            ("tokens", {"dtype": "int32"}, "is int32"),
            ("next_cache_key_0", {"address": 4096}, "must be bound where cache_key_0 is"),
            ("cache_key_0", {"shape": (2, 4, 64, 8)}, "no plan of step for a cache length"),
        ],
    )
    def test_in_a_sentence(self, planned: MarianShape, name: str, change: dict[str, object], sentence: str) -> None:
        _, tensors, runner = self.tensors(planned)
        wrong = {**tensors, name: replace(tensors[name], **change)}  # type: ignore[arg-type]
        with pytest.raises(ComputeError, match=sentence):
            runner.prepare("step", wrong)  # type: ignore[attr-defined]

    def test_by_the_emulator(self, planned: MarianShape) -> None:
        backend, tensors, runner = self.tensors(planned)
        card = next(card for key, card in runner.plans.cards.items() if key == ("step", 48))  # type: ignore[attr-defined]
        context = runner._engine(("step", 48)).context(runner._activations)  # type: ignore[attr-defined]
        assert not context.set_shape("tokens", (2, 99))  # outside the profile
        assert not context.set_shape("nonsense", (2,))
        assert not context.set_address("nonsense", 256)
        assert not context.enqueue()  # nothing is bound
        for each in card.inputs:
            assert context.set_shape(each.name, tensors[each.name].shape)
        for each in (*card.inputs, *card.outputs):
            assert context.set_address(each.name, tensors[each.name].address)
        assert context.enqueue()
        assert context.set_address("next_cache_key_0", tensors["cache_key_1"].address)
        assert not context.enqueue()  # a cache that is not written in place
        backend._gpu.finish()

    def test_memory_outside_an_allocation(self) -> None:
        device = EmulatedDevice()
        address = device.allocate(64)
        device.copy(address, address + 32, 33)
        with pytest.raises(Refused, match="no allocation"):
            device.wait(device.mark())

    def test_more_slots_than_the_plans_hold(self, planned: MarianShape) -> None:
        with pytest.raises(ModelError, match="--max-slots"):
            emulated_engine(planned, 64)

    @pytest.mark.filterwarnings("ignore:Specified provider")
    @pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this one may have CUDA")
    def test_an_onnx_runtime_without_cuda(self, plain_model: MarianShape) -> None:
        """It would go on with the CPU and say nothing."""
        with pytest.raises(ModelError, match="ONNX Runtime left CUDA out and would use CPUExecutionProvider"):
            OnnxRuntimeCudaRunner(plain_model.folder, plain_model.manifest, device=0, stream=0)

    def test_a_longer_cache_than_any_plan(self, planned: MarianShape, tmp_path: Path) -> None:
        _, runner, _ = emulated_backend(planned.folder, planned.manifest)
        assert runner.cache_length(40) == 48
        assert runner.cache_length(129) > 129
        with pytest.raises(ComputeError, match="the plans hold"):
            runner.cache_length(10**6)
