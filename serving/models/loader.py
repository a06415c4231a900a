"""From a version on disk to a model that answers. Blocking work, for a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from beamline.serving.backends.selection import choose, choose_for, look
from beamline.serving.config import ServeConfig
from beamline.serving.contract.manifest import AnyManifest, Manifest, PooledManifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.async_engine import AnyEngine
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.pooled import PooledEngine
from beamline.serving.engine.replicas import DeviceThreads
from beamline.serving.errors import ModelError
from beamline.serving.models.engines import (
    EngineSettings,
    FakeSettings,
    cores,
    fake_engine,
    load_everywhere,
    load_pooled,
)
from beamline.serving.models.registry import Model
from beamline.serving.models.repository import ModelVersion, verify
from beamline.serving.models.settings import SETTINGS_FILE, ModelSettings, apply, check
from beamline.serving.telemetry.history import resident_bytes
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.telemetry.statistics import Statistics
from beamline.serving.text.generator import Generator
from beamline.serving.text.host_work import HostTime, ObserveHostTime, TextWorkers
from beamline.serving.text.model_card import Tokenizer, card_of
from beamline.serving.text.pooled import PooledModel
from beamline.serving.text.token_bytes import ByteTokenizer
from beamline.serving.text.tokenizer import TextTokenizer
from beamline.serving.text.translator import Translator

log = logging.getLogger(__name__)

FAKE_NAME = "fake"  # what an empty name means where nothing else is served
FAKE_LM_NAME = "fake-lm"

Observe = Callable[[StepStats], None]
Loaded = TypeVar("Loaded")


class ServedEngine(AnyEngine, Protocol):
    manifest: Manifest
    plan: Plan
    reserved_bytes: int


class Driver(Protocol):
    """The threads that drive the engines, one for each device."""

    def start(self) -> None: ...

    def add(self, engine: Any, /) -> None: ...

    def retire(self, engine: Any, gone: Callable[[], None], /) -> None: ...

    def drain(self, timeout: float | None, /) -> bool: ...

    def trouble(self, patience: float, /) -> str | None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineMakers:
    """Where engines come from: `real_makers`; tests give their own."""

    load: Callable[[Path, Manifest, ModelSettings, Observe], ServedEngine]
    fake: Callable[[Observe], ServedEngine]
    thread: Callable[[], Driver]
    fake_lm: Callable[[Observe], ServedEngine] | None = None
    pooled: Callable[[Path, PooledManifest, ModelSettings, Observe], PooledEngine] | None = None
    gpus: Mapping[int, str] = field(default_factory=dict)  # by number: the ids of those that models may be on


def real_makers(config: ServeConfig) -> EngineMakers:
    machine = look()
    # A device that was asked for and is not there ends it here.
    usual = choose(config.device, machine)
    log.info("%s", usual.describe())

    def wanted(folder: Path, manifest: AnyManifest, settings: ModelSettings) -> EngineSettings:
        choice = choose_for(settings.device or config.device, machine, folder, manifest)
        if choice.kind != usual.kind:
            log.info("%s %s", manifest.name, choice.describe())
        return EngineSettings(
            threads=config.threads,
            engines=settings.engines or config.engines,
            slots=settings.slots or config.max_slots,
            max_queue=settings.queue or config.max_queue,
            early_refusal=config.early_refusal,
            prefix_cache_bytes=config.prefix_cache_bytes,
            share_prefix_cache=config.share_prefix_cache,
            prompt_slowdown=settings.prompt_slowdown or config.prompt_slowdown,
            cache_entries=settings.cache_entries,
            shortlist=settings.shortlist,
            choice=choice,
            cuda_options=settings.cuda,
        )

    fake = FakeSettings(config.fake_step_seconds, config.fake_slots, config.max_queue, config.early_refusal)
    return EngineMakers(
        load=lambda folder, manifest, settings, observe: load_everywhere(
            folder, manifest, wanted(folder, manifest, settings), observe
        ),
        fake=lambda observe: fake_engine(fake, observe),
        thread=lambda: DeviceThreads(config.threads or cores(), len(machine.probe.devices)),
        fake_lm=lambda observe: fake_engine(fake, observe, language_model=True),
        pooled=lambda folder, manifest, settings, observe: load_pooled(
            folder, manifest, wanted(folder, manifest, settings), observe
        ),
        gpus={} if config.device == "cpu" else {device.number: device.uuid for device in machine.probe.devices},
    )


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    model: Model
    engine: ServedEngine | PooledEngine
    settings: ModelSettings
    manifest: AnyManifest  # as it is on disk
    statistics: Statistics
    label: str  # of its metrics

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def slots(self) -> int:
        return self.engine.rows if isinstance(self.engine, PooledEngine) else self.engine.plan.slots

    def is_still(self, version: ModelVersion, settings: ModelSettings) -> bool:
        """The manifest has the hashes of all else."""
        return self.manifest == version.manifest and self.settings == settings


class ModelLoader:
    def __init__(self, config: ServeConfig, makers: EngineMakers, metrics: Metrics, workers: TextWorkers) -> None:
        self._config = config
        self._makers = makers
        self._metrics = metrics
        self.loads = metrics.loads  # counted by whoever knows how each ended
        self._workers = workers

    def fakes(self) -> list[ServedModel]:
        makers = {FAKE_NAME: self._makers.fake, FAKE_LM_NAME: self._makers.fake_lm}
        return [self._fake(name, make) for name, make in makers.items() if make is not None]

    def _fake(self, name: str, make: Callable[[Observe], ServedEngine]) -> ServedModel:
        statistics = Statistics()
        engine = make(self._metrics.observer(name, name, "1", statistics))
        tokenizer = ByteTokenizer()
        return self._served(engine, tokenizer, tokenizer, ModelSettings(), engine.manifest, statistics, name)

    def load(self, version: ModelVersion, settings: ModelSettings, label: str) -> ServedModel:
        """Checked against its hashes, and warm. A `ModelError` says why it can't be served."""
        folder, manifest = version.folder, version.manifest
        before = resident_bytes()
        verify(folder, manifest)
        statistics = Statistics()
        observe = self._metrics.observer(label, manifest.name, str(manifest.version), statistics)
        if isinstance(manifest, PooledManifest):
            return self._load_pooled(folder, manifest, settings, observe, statistics, label)
        adjusted = apply(settings, manifest, folder.parent / SETTINGS_FILE)
        files = manifest.tokenizers
        source = TextTokenizer.load(folder / files.source.file)
        target = source if files.target == files.source else TextTokenizer.load(folder / files.target.file)
        engine = _loaded(folder, lambda: self._makers.load(folder, adjusted, settings, observe))
        title = f"{manifest.name} version {manifest.version} ({manifest.family})"
        taken = max(0, resident_bytes() - before)
        log.info("%s", "\n  ".join([title, *engine.plan.describe(engine.reserved_bytes, taken)]))
        return self._served(engine, source, target, settings, manifest, statistics, label)

    def _load_pooled(
        self,
        folder: Path,
        manifest: PooledManifest,
        settings: ModelSettings,
        observe: Observe,
        statistics: Statistics,
        label: str,
    ) -> ServedModel:
        check(settings, manifest, folder.parent / SETTINGS_FILE)
        tokenizer = TextTokenizer.load(folder / manifest.tokenizer.file)
        make = self._makers.pooled
        assert make is not None
        engine = _loaded(folder, lambda: make(folder, manifest, settings, observe))
        knows = f"{len(manifest.labels)} labels" if manifest.labels else f"vectors of {manifest.width}"
        log.info("%s version %d (%s)\n  %s", manifest.name, manifest.version, manifest.family, knows)
        host_time = self._observe_host_time(manifest, statistics)
        model = PooledModel(manifest, engine, tokenizer, self._config.text, self._workers, host_time)
        return ServedModel(model, engine, settings, manifest, statistics, label)

    def has_it_now(self, label: str, model: ServedModel | None) -> None:
        """Whose metrics these are before its first step. None: what was counted stays, what steps measure is over."""
        slots = 0 if model is None else model.slots
        self._metrics.slots.labels(label).set(slots)
        self._metrics.load.serves(label, slots)

    def _observe_host_time(self, manifest: AnyManifest, statistics: Statistics) -> ObserveHostTime:
        name, version = manifest.name, str(manifest.version)

        def observe(time: HostTime, sequences: int) -> None:
            self._metrics.triton.host_worked(name, version, time.reading, time.writing)
            statistics.host_worked(time.reading, time.writing, sequences)

        return observe

    def _served(
        self,
        engine: ServedEngine,
        source: Tokenizer,
        target: Tokenizer,
        settings: ModelSettings,
        manifest: Manifest,
        statistics: Statistics,
        label: str,
    ) -> ServedModel:
        card = replace(card_of(engine.manifest), most_entries=engine.plan.most_entries)
        limits, workers, host_time = self._config.text, self._workers, self._observe_host_time(manifest, statistics)
        model: Model = (
            Translator(card, engine, source, target, limits, workers, host_time)
            if card.translates
            else Generator(card, engine, target, limits, workers, host_time)
        )
        return ServedModel(model, engine, settings, manifest, statistics, label)


def _loaded(folder: Path, load: Callable[[], Loaded]) -> Loaded:
    try:
        return load()
    except (ModelError, ImportError):  # a runtime that is not installed is not the model's fault
        raise
    except Exception as error:  # whatever a runtime says: the other models are still served
        raise ModelError(f"{folder} can't be served: {error}") from error
