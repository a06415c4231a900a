"""Driving an engine without a thread: submit, step until it is idle, collect."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.arena import Arena
from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.backends.host import HostMemory
from beamline.serving.contract.backend import Backend, Source
from beamline.serving.contract.manifest import Manifest
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.pooled import PooledEngine
from beamline.serving.engine.request import Request, deliver
from tests.support.emulator import emulated_backend, emulated_cuda_backend, write_emulated_plans

Answer = Output  # of a request that does not stream
BUCKETS = (48, 128)  # and the worst case


# What the engines of the tests run on. The emulated kinds are complete GPU backends over host memory.
KINDS = ("onnxruntime", "tensorrt", "tensorrt-ahead", "cuda")
_kind = ContextVar("kind", default=KINDS[0])
_shadows: dict[Path, tuple[tempfile.TemporaryDirectory[str], Path]] = {}


@contextmanager
def served_by(kind: str) -> Iterator[None]:
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def make_engine(
    folder: Path, manifest: Manifest, slots: int = 16, cache_entries: int | None = None, **options: Any
) -> Engine:
    kind = _kind.get()
    plan = Plan.of(manifest, slots, cache_entries)
    backend: Backend
    if kind == "onnxruntime":
        backend = CpuBackend(folder, manifest, threads=1)
    elif kind == "cuda":
        backend = emulated_cuda_backend(folder, manifest)
    else:
        backend, runner, _ = emulated_backend(_with_plans(folder, manifest), manifest)
        plan = replace(plan, cache_buckets=runner.plans.cache_buckets)
    return Engine(manifest, backend, plan, **{"max_queue": 10_000, "run_ahead": kind != "tensorrt", **options})


def _with_plans(folder: Path, manifest: Manifest) -> Path:
    """The same version with plans for the emulator, elsewhere: the version itself is shared with other tests."""
    if folder not in _shadows:
        directory = tempfile.TemporaryDirectory()
        shadow = Path(directory.name)
        for file in folder.iterdir():
            if file.is_file():
                (shadow / file.name).symlink_to(file)
        write_emulated_plans(shadow, manifest, BUCKETS)
        _shadows[folder] = directory, shadow
    return _shadows[folder][1]


def arenas(engine: Engine) -> dict[str, NDArray[Any]]:
    """What the slots hold, at the current shape: views that a test may write to."""
    return slot_views(engine._backend)


def slot_views(backend: Any) -> dict[str, NDArray[Any]]:
    """By the name of the state tensor: [slots, ...]."""
    arenas: Mapping[str, Arena] = backend._arenas
    tensors = {name: arena.tensor(arena.slots) for name, arena in arenas.items()}
    if isinstance(backend, CpuBackend):
        return {name: HostMemory.view(tensor) for name, tensor in tensors.items()}
    view = backend._device.view
    return {name: view(tensor.address, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def poison(engine: Engine, slot: int) -> None:
    """Something that is not a number, in the first entry of a slot's first cache."""
    arenas(engine)["cache_key_0"][slot, :, 0] = np.nan


def step(engine: Engine | PooledEngine) -> None:
    """As the engine's thread does it: one step, and its outputs to their readers."""
    deliver(engine.step())


def decode(engine: Engine, requests: Sequence[tuple[Source, DecodingOptions]], stagger: int = 0) -> list[Answer]:
    """The answers, in order. With `stagger`, a new request joins the running batch every so many steps."""
    answers: dict[int, Answer] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.busy:
        for number, (source, options) in waiting[: 1 if stagger else None]:

            def take(answer: Output, number: int = number) -> None:
                assert number not in answers, "answered twice"
                answers[number] = answer

            if isinstance(source, np.ndarray):
                engine.submit(Request((), options, take, features=source))
            else:
                engine.submit(Request(tuple(source), options, take))
        waiting = waiting[1:] if stagger else []
        for _ in range(max(1, stagger)):
            step(engine)
    return [answers[number] for number in range(len(requests))]


def results(answers: Sequence[Answer]) -> list[Result]:
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    assert not failed, failed
    return [answer for answer in answers if isinstance(answer, Result)]
