"""Which models are served: load, unload and reload while calls are answered.

A new version is loaded and warmed up beside the old one, in a thread. Then, between two turns of the event loop, calls
begin to go to the new one; the old one finishes what it runs and leaves. A version that fails to load changes
nothing for the others: it is listed with the reason, and what was served before goes on.

Belongs to the event loop. One change at a time: two models that load at once would need the memory of both. A load that
was asked for is finished, or fails, whether or not its caller still waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from beamline.serving.errors import InvalidRequest, ModelError, ModelNotFound, ModelUnavailable, OutOfMemory
from beamline.serving.models.loader import Driver, ModelLoader, ServedModel
from beamline.serving.models.loading import LoadingThread, LoadTooLong
from beamline.serving.models.registry import Model, Models
from beamline.serving.models.repository import ModelVersion, Repository, is_version, scan, verify
from beamline.serving.models.settings import ModelSettings, Versions, read_settings

log = logging.getLogger(__name__)

NOT_LOADED = "it is not loaded"
UNLOADED = "it was unloaded"


class State(StrEnum):
    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the index."""

    name: str
    version: str  # empty where it is about the model as a whole
    state: State
    reason: str = ""


class ModelManager:
    def __init__(
        self,
        root: Path | None,
        loader: ModelLoader,
        models: Models,
        driver: Driver,
        *,
        versions: Versions = "newest",
        only: Sequence[str] = (),
        load_seconds: float | None = None,
        name: str | None = None,
        on_demand: bool = False,
    ) -> None:
        """`only`: models to begin with, as NAME or NAME/VERSION; empty: all of them, or none where they are loaded
        `on_demand`. `load_seconds`: a load that takes longer is given up. `name`: of the only model."""
        self._root = root
        self._name = name
        self._loader = loader
        self._models = models
        self._driver = driver
        self._default_versions = versions
        self._only, self._asked = _asked_for(only)  # versions that were asked for go before those of serving.toml
        self._all = not only and not on_demand
        self._unloaded: set[str] = set()
        self._fakes: list[str] = []  # which no repository has
        self._served: dict[str, dict[int, ServedModel]] = {}
        self._leaving: dict[Model, ServedModel] = {}
        self._loading: tuple[str, str] | None = None
        self._defaults: set[str] = set()  # models whose settings say that they are meant where a call names none
        self._problems: dict[str, dict[str, str]] = {}  # by name and version
        self._may_pass: set[str] = set()  # names whose last load failed for a reason that may pass
        self._known: set[str] = set()  # names in the repository when it was last read
        self._changing = asyncio.Lock()
        self._thread = LoadingThread(load_seconds)
        self._loads: set[asyncio.Task[None]] = set()  # that were asked for
        self.changed: Callable[[], Awaitable[None]] = _nothing  # called after every change

    # -- what there is -------------------------------------------------------------------------------------------

    def index(self) -> list[Listed]:
        lines = []
        for name in sorted({*self._known, *self._served, *self._problems}):
            served = self._served.get(name, {})
            problems = {version: self._without_path(reason) for version, reason in self._problems.get(name, {}).items()}
            of_model = {
                str(version): Listed(name, str(version), State.READY, problems.get(str(version), ""))
                for version in served
            }
            for version, reason in problems.items():
                of_model.setdefault(version, Listed(name, version, State.UNAVAILABLE, reason))
            for each in self._leaving.values():
                if each.manifest.name == name:
                    of_model.setdefault(str(each.version), Listed(name, str(each.version), State.UNLOADING))
            if self._loading is not None and self._loading[0] == name:
                of_model.setdefault(self._loading[1], Listed(name, self._loading[1], State.LOADING))
            if not of_model:
                reason = UNLOADED if name in self._unloaded else NOT_LOADED
                of_model[""] = Listed(name, "", State.UNAVAILABLE, reason)
            lines += [of_model[version] for version in sorted(of_model, key=lambda each: (len(each), each))]
        return lines

    @property
    def known(self) -> set[str]:
        """Names in the repository, when it was last read."""
        return self._known

    def everything(self) -> list[ServedModel]:
        return [model for versions in self._served.values() for model in versions.values()]

    def served(self, model: Model) -> ServedModel:
        found = self._served.get(model.card.name, {}).get(model.card.version)
        return found if found is not None and found.model is model else self._leaving[model]

    # -- changes -------------------------------------------------------------------------------------------------

    async def start(self, *, fake: bool = False, may_be_empty: bool = False) -> None:
        if fake:
            for model in await self._thread.run(self._loader.fakes):
                self._take_over(model.manifest.name, {model.version: model})
                self._fakes.append(model.manifest.name)
        if self._root is None:
            self._models.fall_back_to(self._fakes[0])
            return
        async with self._changing:
            repository = await self._scan()
            missing = sorted(self._only - self._known)
            if missing:
                there = _list(self._known)
                raise ModelError(f"the repository {self._root} has no model {missing[0]!r}; it has {there}")
            if not may_be_empty:  # refused now, not after all of them are loaded
                self._models.check_default({*self._known, *self._fakes})
            for name in repository.folders:
                if self._is_wanted(name):
                    with suppress(ModelUnavailable):  # listed and logged
                        await self._bring(name, repository)
        await self._publish()
        if not self._served and not may_be_empty:
            reasons = [reason for problems in self._problems.values() for reason in problems.values()]
            listed = "".join(f"\n  - {reason}" for reason in reasons) or " there is no model in it"
            raise ModelError(f"no model of the repository {self._root} can be served:{listed}")

    async def load(self, name: str, versions: Versions | None = None) -> None:
        """Serves what the repository has now of this model; `versions` over those of its serving.toml. What has not
        changed stays as it is. Raises `ModelUnavailable` where a version that was wanted can't be served. It goes on
        where whoever awaits it is cancelled."""
        await self._outliving(self._load(name, versions))

    async def _load(self, name: str, versions: Versions | None) -> None:
        async with self._changing:
            try:
                repository = await self._scan()
            except ModelError as error:
                reason = self._without_path(str(error))
                raise ModelUnavailable(f"the model repository can't be read: {reason}") from error
            if name not in repository.folders:
                if name in self._fakes:
                    return
                raise ModelNotFound(f"the repository has no model {name[:100]!r}; it has {_list(self._known)}")
            self._unloaded.discard(name)
            self._only.add(name)
            if versions is None:
                self._asked.pop(name, None)
            else:
                self._asked[name] = versions
            await self._bring(name, repository)

    async def unload(self, name: str) -> None:
        """Calls that use it are still answered."""
        async with self._changing:
            if name not in self._served and name not in self._known:
                raise ModelNotFound(f"there is no model {name[:100]!r} here; there is {_list(self._known)}")
            if name in self._fakes:
                raise InvalidRequest("a fake model comes from no repository, and can't be unloaded")
            self._unloaded.add(name)
            self._may_pass.discard(name)
            self._problems.pop(name, None)
            self._take_over(name, {})
            log.info("%s was unloaded", name)
            await self._publish()

    async def refresh_all(self) -> None:
        """Looks at every model's folder: what is new is loaded, what is gone unloaded; what is unchanged stays."""
        try:
            async with self._changing:
                repository = await self._scan()
        except ModelError as error:
            return log.error("the model repository can't be read: %s", error)
        await self.refresh({*repository.folders, *self._served})

    async def refresh(self, names: Iterable[str]) -> set[str]:
        """After these folders have changed: reload what is wanted, unload what is gone. A name that fails, for whatever
        reason, is logged and listed, and the others go on. Answers which to try again: those that failed for a reason
        that may pass (a disk that is away, too little memory), and not for what lies in the folder."""
        again: set[str] = set()
        for name in sorted(names):
            async with self._changing:
                try:
                    repository = await self._scan()
                    if name not in repository.folders:
                        self._may_pass.discard(name)
                        self._problems.pop(name, None)
                        self._unloaded.discard(name)
                        self._defaults.discard(name)
                        if name in self._served:
                            log.info("%s is gone from the repository, and was unloaded", name)
                            self._take_over(name, {})
                        await self._publish()
                    elif self._is_wanted(name):
                        await self._bring(name, repository)
                except ModelUnavailable:  # listed and logged
                    pass
                except ModelError as error:
                    again.add(name)
                    log.error("%s: %s", name, error)
                    await self._report(name, "the model repository could not be read")
                except Exception as error:
                    again.add(name)
                    log.exception("%s could not be loaded", name)
                    await self._report(name, f"it could not be loaded: {error}")
                if name in self._may_pass:
                    again.add(name)
        return again

    async def _report(self, name: str, reason: str) -> None:
        """About the model as a whole, until it is tried again."""
        if self._is_wanted(name):
            self._problems.setdefault(name, {})[""] = reason
        await self._publish()

    async def _outliving(self, work: Coroutine[Any, Any, None]) -> None:
        """Whoever awaits this may go; the work is finished."""
        task = asyncio.create_task(work)
        self._loads.add(task)
        task.add_done_callback(self._over)
        await asyncio.shield(task)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._loads.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a load failed: %s", error)  # its caller may be gone

    def stop(self) -> None:
        """Begins nothing more."""
        for task in self._loads:
            task.cancel()
        self._thread.stop()

    def _is_wanted(self, name: str) -> bool:
        return name not in self._unloaded and (self._all or name in self._only)

    async def _scan(self) -> Repository:
        if self._root is None:
            return Repository(Path(), {}, (), {})
        repository = await self._thread.run(scan, self._root, self._name)
        self._known = set(repository.folders)
        return repository

    # -- one model -----------------------------------------------------------------------------------------------

    async def _bring(self, name: str, repository: Repository) -> None:
        problems = {each.version: each.reason for each in repository.problems if each.model == name}
        loaded = dict(self._served.get(name, {}))
        self._may_pass.discard(name)
        try:
            await self._load_wanted(name, repository, loaded, problems)
        except ModelError as error:  # its settings
            problems[""] = str(error)
            self._note(name, error)
        self._problems[name] = problems
        for version, reason in problems.items():
            log.error("%s could not be loaded: %s", f"{name}/{version}" if version else name, reason)
        self._take_over(name, loaded)
        await self._publish()
        if wanted_but_absent := self._problems_of_wanted(name, loaded):
            reasons = "; ".join(map(self._without_path, wanted_but_absent))
            now = f"served now: {', '.join(map(str, sorted(loaded)))}" if loaded else "no version of it is served"
            raise ModelUnavailable(f"{name} could not be loaded as asked: {reasons} ({now})")

    async def _load_wanted(
        self, name: str, repository: Repository, loaded: dict[int, ServedModel], problems: dict[str, str]
    ) -> None:
        """Afterwards `loaded` is what shall be served: what was wanted and works. Where none of it works, it is what
        was served before."""
        settings = await self._thread.run(read_settings, repository.folders[name])
        (self._defaults.add if settings.default else self._defaults.discard)(name)
        on_disk = {version.version: version for version in repository.models.get(name, ())}
        wanted = self._asked.get(name) or settings.versions or self._default_versions
        ready: dict[int, ServedModel] = {}
        candidates = self._candidates(wanted, on_disk, problems)
        for version in candidates:
            model = loaded.get(version.version)
            # Time series of their own only where several versions of a model are served.
            alone = wanted == "newest" or len(candidates) == 1
            label = name if alone else f"{name}/{version.version}"
            try:
                if model is not None and model.is_still(version, settings):
                    await self._thread.run(verify, version.folder, version.manifest)
                else:
                    model = await self._load_version(version, settings, label)
            except (ModelError, OSError) as error:
                problems[str(version.version)] = str(error)
                self._note(version.name, error)
            if model is None:
                continue
            ready[version.version] = model
            if wanted == "newest":
                break
        if ready:
            loaded.clear()
            loaded.update(ready)

    def _note(self, name: str, error: Exception) -> None:
        if isinstance(error, LoadTooLong | OutOfMemory | OSError):
            self._may_pass.add(name)

    async def _load_version(self, version: ModelVersion, settings: ModelSettings, label: str) -> ServedModel:
        self._loading = (version.name, str(version.version))
        await self._publish()
        outcome = "failed"
        try:
            model = await self._thread.run(self._loader.load, version, settings, label)
            outcome = "loaded"
            return model
        except LoadTooLong:
            outcome = "given_up"
            raise
        finally:
            self._loader.loads.labels(outcome).inc()
            self._loading = None
            self._thread.drop([])

    def _candidates(
        self, wanted: Versions, on_disk: dict[int, ModelVersion], problems: dict[str, str]
    ) -> list[ModelVersion]:
        """From the newest down: a broken version is no reason to serve nothing where an older one works."""
        if isinstance(wanted, tuple):
            for version in wanted:
                if version not in on_disk:
                    problems.setdefault(str(version), f"version {version} was asked for, but is not in the repository")
            return [on_disk[version] for version in sorted(set(wanted) & set(on_disk), reverse=True)]
        return [on_disk[version] for version in sorted(on_disk, reverse=True)]

    def _problems_of_wanted(self, name: str, loaded: dict[int, ServedModel]) -> list[str]:
        """A broken version that is older than what is served, and was not asked for, is only listed; so is a folder
        that is no version (lost+found), beside one that is served."""
        wanted = self._asked.get(name)
        asked = set(map(str, wanted)) if isinstance(wanted, tuple) else set()
        return [
            reason
            for version, reason in self._problems[name].items()
            if not version  # the settings
            or not loaded
            or version in asked
            or (is_version(version) and int(version) >= max(loaded))
        ]

    async def _publish(self) -> None:
        waiting = {State.LOADING: "it is being loaded", State.UNLOADING: UNLOADED}
        self._models.explain({line.name: line.reason or waiting.get(line.state, "") for line in self.index()})
        await self.changed()

    def _without_path(self, reason: str) -> str:
        """A reason for clients: where the repository lies is not their business."""
        return reason.replace(f"{self._root}/", "")

    # -- taking over ---------------------------------------------------------------------------------------------

    def _take_over(self, name: str, loaded: dict[int, ServedModel]) -> None:
        """In one turn of the event loop: no call ever finds neither the old nor the new one."""
        old = self._served.pop(name, {})
        if loaded:
            self._served[name] = loaded
        staying = set(loaded.values())
        for model in staying - set(old.values()):
            self._driver.add(model.engine)
            self._loader.has_it_now(model.label, model)
        for model in set(old.values()) - staying:
            self._leaving[model.model] = model
        self._models.replace(name, [each.model for each in loaded.values()], self._retire)
        self._models.prefer(sorted(self._defaults - self._unloaded))

    def _retire(self, model: Model) -> None:
        """No call uses it any more."""
        loop, going = asyncio.get_running_loop(), [model]

        def gone() -> None:  # on the engine's thread
            with suppress(RuntimeError):  # the loop is closed: nobody cares
                loop.call_soon_threadsafe(self._forget, going)

        self._driver.retire(self._leaving[model].engine, gone)

    def _forget(self, going: list[Any]) -> None:
        """No variable here has the model for itself, and so the event loop never ends it."""
        label = self._leaving[going[0]].label
        going[0] = self._leaving.pop(going[0])
        self._loader.has_it_now(label, next((model for model in self.everything() if model.label == label), None))
        self._thread.drop(going)


async def _nothing() -> None:
    pass


def _asked_for(only: Sequence[str]) -> tuple[set[str], dict[str, Versions]]:
    """The names, and the versions of those that were given with one."""
    names: set[str] = set()
    pinned: dict[str, tuple[int, ...]] = {}
    for item in only:
        name, slash, version = item.partition("/")
        if not name or (slash and not (version.isdecimal() and int(version) >= 1)):
            raise ModelError(f"{item!r} names no model to load: write NAME or NAME/VERSION")
        names.add(name)
        if slash:
            pinned[name] = (*pinned.get(name, ()), int(version))
    return names, dict(pinned)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"
