"""The models that are served. A name from a request is only ever a key here.

A call *uses* a model: as long as one does, a model that was replaced or unloaded goes on answering it, and only then
is it retired. That is why no call fails when a version changes. Belongs to the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from beamline.serving.contract.call import current_call
from beamline.serving.errors import InvalidRequest, ModelNotFound, ModelUnavailable
from beamline.serving.text.generator import Generator
from beamline.serving.text.pooled import PooledModel
from beamline.serving.text.translator import Translator

Writer = Translator | Generator
Model = Writer | PooledModel
Kinds = tuple[type[Translator] | type[Generator] | type[PooledModel], ...]

_MOST_NAMES = 20  # in an error message
_DOES: dict[Kinds | None, str] = {
    (Translator,): "translates",
    (Generator,): "continues a prompt",
    (PooledModel,): "classifies or embeds",
}


class _Served:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.calls = 0
        self.retire: Callable[[Model], None] | None = None  # set when it was replaced


class Models:
    def __init__(self, models: Iterable[Model] = (), default: str | None = None) -> None:
        self._by_name: dict[str, dict[str, _Served]] = {}
        self._absent: dict[str, str] = {}
        self._default = default
        self._preferred: tuple[str, ...] = ()
        # Called for every call that used a model: its name and version, the seconds it took, and if it was answered.
        self.called: Callable[[str, str, float, bool], None] = lambda name, version, seconds, answered: None
        by_name: dict[str, list[Model]] = {}
        for model in models:
            by_name.setdefault(model.card.name, []).append(model)
        for name, versions in by_name.items():
            self.replace(name, versions, lambda model: None)

    # -- who is served -------------------------------------------------------------------------------------------

    def replace(self, name: str, models: Sequence[Model], retire: Callable[[Model], None]) -> None:
        """From now on the model has these versions, and calls that come now use them. `retire` is called for each that
        it had and no longer has: at once, or when the last call that uses it is over."""
        old = self._by_name.pop(name, {})
        kept = {served.model: served for served in old.values()}
        new: dict[str, _Served] = {}
        for model in sorted(models, key=lambda each: each.card.version):
            staying = model in kept
            new[str(model.card.version)] = kept.pop(model) if staying else _Served(model)
        if new:
            self._by_name[name] = new
            self._by_name = dict(sorted(self._by_name.items()))
        for served in kept.values():
            served.retire = retire
            self._retire_if_unused(served)

    def explain(self, absent: Mapping[str, str]) -> None:
        """Models of the repository that are not served, and why: their callers are asked to try later."""
        self._absent = dict(absent)

    def fall_back_to(self, name: str) -> None:
        """The default, unless one was given."""
        self._default = self._default or name

    def prefer(self, names: Iterable[str]) -> None:
        """The default, where none was given: the first of these that is served. Where none of them is, a call that
        names no model is not answered by another one."""
        self._preferred = tuple(names)

    def check_default(self, known: Iterable[str] | None = None) -> None:
        """`known`: what there is to load, before that is done."""
        names = list(self._by_name) if known is None else sorted(known)
        if self._default is not None and self._default not in names:
            which = "loaded ones" if known is None else "repository's"
            raise ModelNotFound(f"the default model {self._default!r} is not among the {which}: {_some(names)}")

    def everything(self) -> list[Model]:
        """By name, then by version."""
        return [served.model for versions in self._by_name.values() for served in versions.values()]

    # -- for calls -----------------------------------------------------------------------------------------------

    @contextmanager
    def use(self, name: str, version: str) -> Iterator[Writer]:
        """Around everything that a call does with a model."""
        with self._use_writer(name, version, (Translator, Generator)) as model:
            yield model

    @contextmanager
    def _use_writer(self, name: str, version: str, kinds: Kinds) -> Iterator[Writer]:
        served = self._find(name, version, kinds)
        if isinstance(served.model, PooledModel):
            raise InvalidRequest(
                f"model {served.model.card.name!r} writes no text: it classifies or embeds (classify, embed)"
            )
        with self._used(served):
            yield served.model

    @contextmanager
    def use_any(self, name: str, version: str) -> Iterator[Model]:
        """Whatever it does: for an API that all kinds of models share."""
        served = self._find(name, version, None)
        with self._used(served):
            yield served.model

    @contextmanager
    def use_pooled(self, name: str, version: str) -> Iterator[PooledModel]:
        served = self._find(name, version, (PooledModel,))
        if not isinstance(served.model, PooledModel):
            raise InvalidRequest(f"model {served.model.card.name!r} neither classifies nor embeds: it writes text")
        with self._used(served):
            yield served.model

    @contextmanager
    def _used(self, served: _Served) -> Iterator[None]:
        served.calls += 1
        current_call().answered_by(served.model.card.name)
        began, answered = time.monotonic(), False
        try:
            yield
            answered = True
        finally:
            card = served.model.card
            self.called(card.name, str(card.version), time.monotonic() - began, answered)
            served.calls -= 1
            self._retire_if_unused(served)

    @contextmanager
    def use_translator(self, name: str, version: str) -> Iterator[Translator]:
        with self._use_writer(name, version, (Translator,)) as model:
            if not isinstance(model, Translator):
                name = model.card.name
                raise InvalidRequest(f"model {name!r} does not translate: it continues a prompt (generate)")
            yield model

    @contextmanager
    def use_generator(self, name: str, version: str) -> Iterator[Generator]:
        with self._use_writer(name, version, (Generator,)) as model:
            if not isinstance(model, Generator):
                raise InvalidRequest(f"model {model.card.name!r} is no language model: it translates (translate)")
            yield model

    def find(self, name: str, version: str) -> Model:
        """An empty name means the default model, or the only one; an empty version the newest. For what is answered at
        once: a call that awaits something must `use` the model."""
        return self._find(name, version, None).model

    def default(self) -> Model | None:
        """What a call that names no model would use; None where it would be refused."""
        try:
            return self._find("", "", (Translator, Generator)).model
        except (InvalidRequest, ModelNotFound, ModelUnavailable):
            return None

    def versions(self, name: str) -> list[Model]:
        """All that are served, ascending."""
        name = name or self._default_name(None)
        self._find(name, "", None)
        return [served.model for served in self._by_name[name].values()]

    def _find(self, name: str, version: str, kinds: Kinds | None) -> _Served:
        """`kinds`: what a call that names no model can mean; None: any."""
        if not name:
            name = self._default_name(kinds)
        versions = self._by_name.get(name)
        if versions is None:
            if name in self._absent:
                raise self._unavailable(name)
            raise ModelNotFound(f"there is no model {name[:100]!r} here; there is {self._names()}")
        if not version:
            return list(versions.values())[-1]
        if version not in versions:
            raise ModelNotFound(f"model {name!r} has no version {version[:20]!r} here; there is {', '.join(versions)}")
        return versions[version]

    def _retire_if_unused(self, served: _Served) -> None:
        if served.retire is not None and not served.calls:
            retire, served.retire = served.retire, None
            retire(served.model)

    def _default_name(self, kinds: Kinds | None) -> str:
        """The default, if it is of such a kind, or the only one that is; for any kind, the only one that writes, or at
        all. Where it is not of the kind, the only one that writes is found, which then says what it does."""
        default = self._default or next((name for name in self._preferred if name in self._by_name), None)
        if default is not None and (default not in self._by_name or self._is(default, kinds)):
            return default
        pooled = kinds == (PooledModel,)
        if default is None and not pooled and (absent := [name for name in self._preferred if name in self._absent]):
            raise self._unavailable(absent[0])
        writers = [name for name in self._by_name if self._is(name, (Translator, Generator))]
        names = [name for name in self._by_name if self._is(name, kinds)] if kinds else writers or list(self._by_name)
        if not names and not pooled and len(writers) == 1:
            names = writers
        if not names:
            raise self._none_served(_DOES.get(kinds, "writes text"))
        if len(names) != 1:
            raise ModelNotFound(
                f"the request names no model, and there are several: {_some(names)}; "
                "name one (--model), or serve with --default-model"
            )
        return names[0]

    def _none_served(self, does: str) -> ModelNotFound | ModelUnavailable:
        """For a call that names no model, where none that is served can answer it. What one that is not served could do
        is not known here: it may be what the caller wants."""
        absent = [name for name in self._absent if name not in self._by_name]
        if len(absent) == 1:
            return self._unavailable(absent[0])
        if absent:
            return ModelUnavailable(f"no model that {does} is served now; not served are {_some(absent)}: name one")
        if not self._by_name:
            return ModelUnavailable("no model is served here now")
        return ModelNotFound(f"no model here {does}; there is {self._names()}")

    def _unavailable(self, name: str) -> ModelUnavailable:
        return ModelUnavailable(f"model {name!r} is not served now: {self._absent[name]}")

    def _is(self, name: str, kinds: Kinds | None) -> bool:
        return kinds is None or isinstance(next(iter(self._by_name[name].values())).model, kinds)

    def _names(self) -> str:
        return _some(list(self._by_name))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "none"
