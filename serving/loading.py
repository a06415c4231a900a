"""From a repository on disk to models that answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from serving.bridge import ModelEngine
from serving.config import ServeConfig
from serving.engine.build import EngineSettings, FakeSettings, fake_engine, load_engine, load_pooled
from serving.engine.plan import Plan
from serving.engine.pooled import PooledEngine
from serving.engine.stats import StepStats
from serving.engine.thread import EngineThread
from serving.errors import ModelError
from serving.manifest import Manifest, PooledManifest
from serving.metrics import Metrics
from serving.repository import ModelVersion, scan, verify
from serving.text.generator import Generator
from serving.text.pooled import PooledModel
from serving.text.protocol import Tokenizer, card_of
from serving.text.translator import Translator
from serving.tokenizer import TextTokenizer
from serving.tokenizer_bytes import ByteTokenizer

log = logging.getLogger(__name__)

FAKE_NAME = "fake"  # what an empty name means where nothing else is served
FAKE_LM_NAME = "fake-lm"

Observe = Callable[[StepStats], None]
Loaded = TypeVar("Loaded")


class ServedEngine(ModelEngine, Protocol):
    manifest: Manifest
    plan: Plan
    reserved_bytes: int


class Driver(Protocol):
    """The thread that drives the engines of a device."""

    def start(self) -> None: ...

    def drain(self, timeout: float | None) -> bool: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineMakers:
    """Where engines come from. `serving.engine` is the real one; tests give their own."""

    load: Callable[[Path, Manifest, Observe], ServedEngine]
    fake: Callable[[Observe], ServedEngine]
    thread: Callable[[Sequence[Any]], Driver]
    fake_lm: Callable[[Observe], ServedEngine] | None = None
    pooled: Callable[[Path, PooledManifest, Observe], PooledEngine] | None = None


def real_makers(config: ServeConfig) -> EngineMakers:
    settings = EngineSettings(
        threads=config.threads,
        slots=config.max_slots,
        max_queue=config.max_queue,
        early_refusal=config.early_refusal,
        prefix_cache_bytes=config.prefix_cache_bytes,
    )
    fake = FakeSettings(config.fake_step_seconds, config.fake_slots, config.max_queue, config.early_refusal)
    return EngineMakers(
        load=lambda folder, manifest, observe: load_engine(folder, manifest, settings, observe),
        fake=lambda observe: fake_engine(fake, observe),
        fake_lm=lambda observe: fake_engine(fake, observe, language_model=True),
        thread=EngineThread,
        pooled=lambda folder, manifest, observe: load_pooled(folder, manifest, settings, observe),
    )


@dataclass(frozen=True, slots=True)
class LoadedModels:
    models: list[Translator | Generator | PooledModel]
    engines: list[ServedEngine | PooledEngine]


class ModelLoader:
    def __init__(self, config: ServeConfig, makers: EngineMakers, metrics: Metrics, workers: Executor) -> None:
        self._config = config
        self._makers = makers
        self._metrics = metrics
        self._workers = workers

    def load(self) -> LoadedModels:
        """Blocks for as long as it takes. A model that can't be served is reported and left out."""
        loaded = LoadedModels([], [])
        if self._config.fake:
            self._add_fake(loaded)
        if self._config.repository is not None:
            self._add_repository(loaded, self._config.repository)
        return loaded

    def _add_fake(self, loaded: LoadedModels) -> None:
        engine = self._makers.fake(self._metrics.observer(FAKE_NAME, FAKE_NAME, "1"))
        self._add(loaded, engine, ByteTokenizer(), ByteTokenizer())
        if self._makers.fake_lm is not None:
            language_model = self._makers.fake_lm(self._metrics.observer(FAKE_LM_NAME, FAKE_LM_NAME, "1"))
            self._add(loaded, language_model, ByteTokenizer(), ByteTokenizer())

    def _add_repository(self, loaded: LoadedModels, root: Path) -> None:
        repository = scan(root)
        problems = [problem.reason for problem in repository.problems]
        for versions in repository.models.values():
            # From the newest down: a broken version is no reason to serve nothing where an older one works.
            for version in reversed(versions):
                try:
                    self._load_version(loaded, version)
                except ModelError as error:
                    problems.append(str(error))
                    continue
                if not self._config.all_versions:
                    break
        for problem in problems:
            log.error("not served: %s", problem)
        if not loaded.models:
            reasons = "".join(f"\n  - {problem}" for problem in problems) or " it is empty"
            raise ModelError(f"no model of the repository {root} can be served:{reasons}")

    def _load_version(self, loaded: LoadedModels, version: ModelVersion) -> None:
        folder, manifest = version.folder, version.manifest
        verify(folder, manifest)
        # Time series of their own only where several versions of a model are served.
        label = f"{manifest.name}/{manifest.version}" if self._config.all_versions else manifest.name
        observe = self._metrics.observer(label, manifest.name, str(manifest.version))
        if isinstance(manifest, PooledManifest):
            self._load_pooled(loaded, folder, manifest, observe)
            return
        files = manifest.tokenizers
        source = TextTokenizer.load(folder / files.source.file)
        target = source if files.target == files.source else TextTokenizer.load(folder / files.target.file)
        engine = _loaded(folder, lambda: self._makers.load(folder, manifest, observe))
        self._add(loaded, engine, source, target)

    def _load_pooled(self, loaded: LoadedModels, folder: Path, manifest: PooledManifest, observe: Observe) -> None:
        tokenizer = TextTokenizer.load(folder / manifest.tokenizer.file)
        make = self._makers.pooled
        assert make is not None
        engine = _loaded(folder, lambda: make(folder, manifest, observe))
        loaded.engines.append(engine)
        loaded.models.append(PooledModel(manifest, engine, tokenizer, self._config.text, self._workers))
        knows = f"{len(manifest.labels)} labels" if manifest.labels else f"vectors of {manifest.width}"
        log.info("%s version %d (%s)\n  %s", manifest.name, manifest.version, manifest.family, knows)

    def _add(self, loaded: LoadedModels, engine: ServedEngine, source: Tokenizer, target: Tokenizer) -> None:
        card = replace(card_of(engine.manifest), most_entries=engine.plan.most_entries)
        title = f"{card.name} version {card.version} ({engine.manifest.family})"
        log.info("%s", "\n  ".join([title, *engine.plan.describe(engine.reserved_bytes)]))
        loaded.engines.append(engine)
        limits, workers = self._config.text, self._workers
        if card.translates:
            loaded.models.append(Translator(card, engine, source, target, limits, workers))
        else:
            loaded.models.append(Generator(card, engine, target, limits, workers))


def _loaded(folder: Path, load: Callable[[], Loaded]) -> Loaded:
    try:
        return load()
    except (ModelError, ImportError):  # a runtime that is not installed is not the model's fault
        raise
    except Exception as error:  # whatever a runtime says: the other models are still served
        raise ModelError(f"{folder} can't be served: {error}") from error
