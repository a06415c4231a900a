"""From a model version on disk to an engine that is warm."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from beamline.serving.backends.factory import make_backend, make_pooled
from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.backends.probe import CudaDevice
from beamline.serving.backends.selection import ON_CPU, Choice
from beamline.serving.backends.weights import Weights
from beamline.serving.contract.backend import MeasuredBackend
from beamline.serving.contract.manifest import Manifest, PooledManifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.pooled import PooledEngine
from beamline.serving.engine.replicas import CombinedStats, Replicas
from beamline.serving.engine.request import Request, RequestOutput
from beamline.serving.errors import ModelError, OutOfMemory, Overloaded

log = logging.getLogger(__name__)

_SMALL_WEIGHTS = 12 * 2**20  # measured: 8 MB in 8 bits gain from it, 15 MB in float don't
_MOST_ENGINES = 4

Observe = Callable[[StepStats], None]


@dataclass(frozen=True)
class EngineSettings:
    threads: int = 0  # 0: as many as there are cores
    engines: int = 0  # that share them, on the CPU; 0: as suits the model
    slots: int = 32
    max_queue: int = 1024
    early_refusal: bool = True
    warm_up: bool = True
    prefix_cache_bytes: int = 0
    share_prefix_cache: bool = False  # between tenants
    prompt_slowdown: float = 2.0  # of those who decode, while prompts are taken in
    cache_entries: int | None = None  # that one request may need; None: as suits the task
    shortlist: bool = False
    choice: Choice = ON_CPU
    cuda_options: Mapping[str, str] = field(default_factory=dict)  # of ONNX Runtime's CUDA provider


@dataclass(frozen=True)
class FakeSettings:
    step_seconds: float = 0.0
    slots: int = 8
    max_queue: int = 1024
    early_refusal: bool = True


def load_engine(folder: Path, manifest: Manifest, settings: EngineSettings, observe: Observe) -> Engine:
    """On one device: the CPU, or the first that was chosen."""
    devices = settings.choice.devices
    engine = _on_device(folder, manifest, settings, devices[0] if devices else None)
    engine.observe = observe  # nobody wants to see the warm-up in the metrics
    return engine


def load_everywhere(folder: Path, manifest: Manifest, settings: EngineSettings, observe: Observe) -> Engine | Replicas:
    """On every device that was chosen; on the CPU, as several engines that share its cores."""
    places: list[tuple[EngineSettings, CudaDevice | None]] = [(settings, each) for each in settings.choice.devices]
    places = places or [(share, None) for share in _shares(manifest, settings)]
    if len(places) < 2:
        return load_engine(folder, manifest, settings, observe)
    weights = Weights(folder, manifest)
    with weights.in_memory():
        engines = [_on_device(folder, manifest, share, device, weights) for share, device in places]
    for engine, each in zip(engines, CombinedStats(observe, len(engines)).observers(), strict=True):
        engine.observe = each
    return Replicas(engines)


def engines_for(manifest: Manifest, threads: int) -> int:
    """A small model's operators are too short to be worth sharing between threads: there, several engines with fewer
    threads each answer more. Not so where weights would have to be read twice, or prompts remembered twice; nor beyond
    what one interpreter can feed."""
    small = manifest.weights.bytes <= _SMALL_WEIGHTS and manifest.graphs.prefill is None
    return min(threads, _MOST_ENGINES) if small else 1


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shares(manifest: Manifest, settings: EngineSettings) -> list[EngineSettings]:
    """What each of the CPU's engines has of threads, slots, queue and memory."""
    threads, slots = settings.threads or cores(), settings.slots
    count = settings.engines or min(slots, engines_for(manifest, threads))
    if count > min(threads, slots):
        lack = f"{threads} threads" if count > threads else f"{slots} slots"
        raise ModelError(f"{manifest.name} is to have {count} engines, but there are {lack} for them")
    if count == 1:
        return [settings]

    def share(whole: int, index: int) -> int:
        return whole // count + (index < whole % count)

    return [
        replace(
            settings,
            threads=share(threads, index),
            slots=share(slots, index),
            max_queue=max(1, share(settings.max_queue, index)),
            prefix_cache_bytes=settings.prefix_cache_bytes // count,
        )
        for index in range(count)
    ]


def _on_device(
    folder: Path,
    manifest: Manifest,
    settings: EngineSettings,
    device: CudaDevice | None,
    weights: Weights | None = None,
) -> Engine:
    options, threads = dict(settings.cuda_options), settings.threads
    made = make_backend(folder, manifest, threads, settings.choice, device, options, settings.shortlist, weights)
    plan = Plan.of(manifest, settings.slots, settings.cache_entries)
    if made.cache_buckets is not None:
        if settings.cache_entries is not None:
            raise ModelError(
                f"{manifest.name} has cache_entries, but its TensorRT plans were built for caches of "
                f"{', '.join(map(str, made.cache_buckets))} entries"
            )
        plan = replace(plan, cache_buckets=made.cache_buckets)
    if device is not None and isinstance(made.backend, MeasuredBackend):
        plan = plan_that_fits(plan, made.backend, manifest, device.number)
    engine = Engine(
        manifest,
        made.backend,
        plan,
        max_queue=settings.max_queue,
        early_refusal=settings.early_refusal,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        share_prefix_cache=settings.share_prefix_cache,
        prompt_slowdown=settings.prompt_slowdown,
    )
    engine.device = None if device is None else device.number
    if settings.warm_up:
        _warm_up(engine)
    return engine


def plan_that_fits(plan: Plan, backend: MeasuredBackend, manifest: Manifest, device: int) -> Plan:
    """Fewer slots, where a GPU's free memory does not hold all; some of it is left to others."""
    free = backend.device_stats().free_bytes
    budget = free - free // 8

    def fits(slots: int) -> bool:
        return backend.needed_bytes(slots, replace(plan.largest, batch=slots)) <= budget

    slots = next((count for count in range(plan.slots, 0, -1) if fits(count)), 0)
    if slots == plan.slots:
        return plan
    memory = f"GPU {device} has {free / 2**20:,.0f} MiB left"
    longest = f"{plan.largest.cache} cache entries (its longest output, {plan.max_beams} beams that share nothing)"
    if slots == 0:
        one = backend.needed_bytes(1, replace(plan.largest, batch=1))
        raise OutOfMemory(
            f"{memory}, and one request of {manifest.name} may need {one / 2**20:,.0f} MiB, for {longest}: serve "
            "fewer models beside it, or on a larger GPU"
        )
    log.warning("%s: %d slots of %s fit instead of %d, each of %s", memory, slots, manifest.name, plan.slots, longest)
    return replace(plan, slots=slots)


def load_pooled(folder: Path, manifest: PooledManifest, settings: EngineSettings, observe: Observe) -> PooledEngine:
    options = dict(settings.cuda_options)
    backend = make_pooled(folder, manifest, settings.threads, settings.choice, settings.slots, options)
    if settings.warm_up:
        source = (manifest.pad_id,) * min(16, manifest.max_source_length)
        for rows in sorted({1, settings.slots}):
            backend.run([source] * rows)
    engine = PooledEngine(
        manifest,
        backend,
        rows=settings.slots,
        max_queue=settings.max_queue,
        early_refusal=settings.early_refusal,
        observe=observe,
    )
    engine.device = settings.choice.devices[0].number if settings.choice.devices else None
    return engine


def fake_engine(settings: FakeSettings, observe: Observe, language_model: bool = False) -> Engine:
    manifest = fake_manifest("fake-lm", "generate") if language_model else fake_manifest()
    backend = FakeBackend(manifest, settings.step_seconds)
    return Engine(
        manifest,
        backend,
        Plan.of(manifest, settings.slots),
        max_queue=settings.max_queue,
        early_refusal=settings.early_refusal,
        observe=observe,
    )


def _warm_up(engine: Engine) -> None:
    """Decodes a little, narrow and wide, alone and with all slots full, so that the first user doesn't wait for it; and
    shows that the model answers at all."""
    manifest = engine.manifest
    length = min(16, manifest.limits.max_source_length)
    source: tuple[int, ...] = (manifest.vocabulary.eos_ids[0],) * length
    features = np.zeros((length, manifest.feature_width), np.float32) if manifest.feature_width else None
    for beams in sorted({1, manifest.defaults.beam_size}):
        for count in sorted({1, engine.plan.slots}):
            outputs: list[RequestOutput] = []
            options = DecodingOptions(beam_size=beams, num_hypotheses=1, max_length=4)
            for _ in range(count):
                request = Request(() if features is not None else source, options, features=features)
                try:
                    engine.submit(request)
                except Overloaded:  # fewer may wait than can run
                    outputs += engine.step()
                    engine.submit(request)
            while engine.busy:
                outputs += engine.step()
            failed = [each.output for each in outputs if isinstance(each.output, Exception)]
            if failed:
                raise ModelError(
                    f"{manifest.name} version {manifest.version} does not answer: {failed[0]}"
                ) from failed[0]
