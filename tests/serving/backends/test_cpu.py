"""Memory that stays where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.backends.in_place_check import refuse_copies
from beamline.serving.contract.backend import Shape, Start, StepInputs
from beamline.serving.errors import ModelError
from tests.support.engines import slot_views
from tests.support.marian_shape import PAD, MarianShape

LARGEST = Shape(4, 8, 64, 32)


def inputs(batch: int, beams: int) -> StepInputs:
    none = np.zeros((batch, beams, 0), np.float32)
    return StepInputs(np.full(batch, -1), none.astype(np.int64), none, none)


@pytest.fixture
def backend(plain_model: MarianShape) -> CpuBackend:
    made = CpuBackend(plain_model.folder, plain_model.manifest, threads=1)
    made.allocate(4, LARGEST)
    return made


def test_caches_are_written_in_place(backend: CpuBackend) -> None:
    """A step writes its K entries at the write index, and nothing else, at the arena's own address."""
    shape = Shape(2, 3, 32, 8)
    backend.resize(shape, 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
        backend.place(slot, memory, Start(PAD, 3, independent=False))
    arenas = [arena for name, arena in backend._arenas.items() if name.startswith("cache_")]
    addresses = [arena.address for arena in arenas]
    views = [view for name, view in slot_views(backend).items() if name.startswith("cache_")]
    for step in range(4):
        before = [view.copy() for view in views]
        backend.run(inputs(2, 3))
        for old, view in zip(before, views, strict=True):
            changed = np.argwhere((old != view).any(axis=(1, 3)))  # slot, entry
            assert {tuple(pair) for pair in changed.tolist()} == {
                (slot, entry) for slot in range(2) for entry in range(3 * step, 3 * step + 3)
            }
    assert [arena.address for arena in arenas] == addresses


def test_a_shape_that_comes_again_is_bound_as_it_was(backend: CpuBackend, plain_model: MarianShape) -> None:
    """Neighbours come and go, in more shapes than are kept bound, and now and then a word is forced; the numbers of a
    slot are those of a backend that has this one alone."""
    alone = CpuBackend(plain_model.folder, plain_model.manifest, threads=1)
    alone.allocate(4, LARGEST)
    start = Start(PAD, 2, independent=False)
    shapes = [Shape(batch, 2, cache, 8) for cache in range(48, 60) for batch in (1, 2, 3)]
    bound = []
    for again in range(2):
        for each in (backend, alone):
            each.resize(Shape(1, 2, 48, 8), 0)
            each.place(0, each.encode([[5, 6, 7]])[0], start)
        for number, shape in enumerate([*shapes, shapes[0]] if again else shapes[:16]):
            backend.resize(shape, 1)
            alone.resize(replace(shape, batch=1), 1)
            for slot in range(1, shape.batch):
                backend.place(slot, backend.encode([[9, slot]])[0], start)
            forced = 7 if number % 5 == 0 else -1
            found = backend.run(replace(inputs(shape.batch, 2), forced=np.full(shape.batch, forced)))
            expected = alone.run(replace(inputs(1, 2), forced=np.full(1, forced)))
            assert found.tokens[0].tolist() == expected.tokens[0].tolist()
            np.testing.assert_allclose(found.scores[0], expected.scores[0], atol=1e-5)
            bound.append(len(backend._bindings))
            for each in (backend, alone):  # one step each, so that no cache is full
                each.resize(Shape(1, 2, 48, 8), 0)
                each.place(0, each.encode([[5, 6, 7 + number % 3]])[0], start)
    assert max(bound) == 32


def test_what_was_given_is_kept_for_one_shape_alone(backend: CpuBackend) -> None:
    """Edits may be megabytes, a shortlist as well; a step without them keeps nothing worth mentioning."""
    edits = replace(
        inputs(1, 2),
        edit_index=np.full((1, 2, 64), 7),
        edit_scale=np.ones((1, 2, 64), np.float32),
        edit_add=np.zeros((1, 2, 64), np.float32),
    )
    for cache, given in ((48, edits), (49, edits), (50, edits), (51, inputs(1, 2))):
        backend.resize(Shape(1, 2, cache, 8), 0)
        backend.place(0, backend.encode([[5, 6]])[0], Start(PAD, 2, independent=False))
        backend.run(given)
    kept = [array.nbytes for bound in backend._bindings.values() for array in bound.from_host.values()]
    assert max(kept) <= 8


def test_all_shapes_leave_what_comes_next_in_one_place(backend: CpuBackend) -> None:
    """Recurrent states and the ancestry may be megabytes, too, and 32 shapes are kept bound."""
    for cache in (48, 49, 50):
        backend.resize(Shape(1, 2, cache, 8), 0)
        backend.place(0, backend.encode([[5, 6]])[0], Start(PAD, 2, independent=False))
        backend.run(inputs(1, 2))
    carried = [[array for _, array in bound.carry] for bound in backend._bindings.values()]
    assert len(carried) >= 3
    assert all(np.shares_memory(*pair) for one in carried for pair in zip(one, carried[0], strict=True))


def test_a_layout_that_fails_half_way_is_made_whole(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some arenas lie anew by then and others don't: who comes next gets what a new backend gives."""

    def step() -> object:
        backend.place(0, backend.encode([[5, 6, 7]])[0], Start(PAD, 2, independent=False))
        backend.run(inputs(2, 2))
        return backend.run(inputs(2, 2)).tokens[0].tolist()

    backend.resize(Shape(2, 2, 32, 8), 0)
    expected = step()
    arenas = list(backend._arenas.values())
    layouts = [arena.layout.shape for arena in arenas]
    with monkeypatch.context() as patch:
        patch.setattr(backend._arenas["cache_value_0"], "resize", lambda sizes, slots: [][1])
        with pytest.raises(IndexError):
            backend.resize(Shape(1, 2, 48, 8), 1)
    backend.resize(Shape(2, 2, 32, 8), 0)
    assert [arena.layout.shape for arena in arenas] == layouts
    assert step() == expected


def test_a_runtime_that_copies_caches_is_refused(backend: CpuBackend) -> None:
    backend.resize(Shape(1, 1, 32, 8), 0)
    backend.place(0, backend.encode([[5]])[0], Start(PAD, 1, independent=True))
    binding = backend._bound_to(Shape(1, 1, 32, 8)).binding
    elsewhere = np.zeros_like(slot_views(backend)["cache_key_0"][:1])
    binding.bind_output(
        "next_cache_key_0", "cpu", 0, elsewhere.dtype.type, list(elsewhere.shape), elsewhere.ctypes.data
    )
    with pytest.raises(ModelError, match="in place"):
        refuse_copies(lambda: backend.run(inputs(1, 1)))


def test_a_graph_without_an_in_place_cache_is_refused_at_load(plain_model: MarianShape, tmp_path: Path) -> None:
    """The step graph with its cache written through one more copy."""
    for file in plain_model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    graph = onnx.load(tmp_path / "step.onnx", load_external_data=False)
    for node in graph.graph.node:
        if node.op_type == "TensorScatter" and node.input[0] == "cache_key_0":
            node.input[0] = "cache_key_0_copy"
            break
    copy = onnx.helper.make_node("Add", ["cache_key_0", "nothing_to_add"], ["cache_key_0_copy"])
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e-9, np.float32), "nothing_to_add"))
    graph.graph.node.insert(0, copy)
    (tmp_path / "step.onnx").write_bytes(graph.SerializeToString())
    backend = CpuBackend(tmp_path, plain_model.manifest, threads=1)
    with pytest.raises(ModelError, match="in place"):
        backend.allocate(2, LARGEST)


def test_moving_a_slot_moves_all_of_it(backend: CpuBackend) -> None:
    backend.resize(Shape(2, 2, 32, 8), 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9]])):
        backend.place(slot, memory, Start(PAD, 2, independent=False))
    for _ in range(3):
        backend.run(inputs(2, 2))
    moved = {name: view[1].copy() for name, view in slot_views(backend).items()}
    backend.move(1, 0)
    for name, view in slot_views(backend).items():
        np.testing.assert_array_equal(view[0], moved[name], err_msg=name)
