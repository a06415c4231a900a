"""The models that are loaded. A name from a request is only ever a key here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from serving.errors import InvalidRequest, ModelNotFound
from serving.text.generator import Generator
from serving.text.pooled import PooledModel
from serving.text.translator import Translator

Writer = Translator | Generator
Model = Writer | PooledModel

_MOST_NAMES = 20  # in an error message


class Models:
    def __init__(self, models: Iterable[Model], default: str | None = None) -> None:
        # Told of every call that used a model: its name and version, the seconds it took, and if it was answered.
        self.called: Callable[[str, str, float, bool], None] = lambda name, version, seconds, answered: None
        self._by_name: dict[str, dict[str, Model]] = {}
        for model in sorted(models, key=lambda each: (each.card.name, each.card.version)):
            versions = self._by_name.setdefault(model.card.name, {})
            versions[str(model.card.version)] = model
        if default is not None and default not in self._by_name:
            raise ModelNotFound(f"the default model {default!r} is not among the loaded ones: {self._names()}")
        self._default = default

    def __iter__(self) -> Iterator[Writer]:
        """Those that write text, by name, then by version."""
        models = (model for versions in self._by_name.values() for model in versions.values())
        return (model for model in models if not isinstance(model, PooledModel))

    @contextmanager
    def use(self, name: str, version: str) -> Iterator[Writer]:
        """Around everything that a call does with a model."""
        model = self.find(name, version, pooled=False)
        if isinstance(model, PooledModel):
            raise InvalidRequest(f"model {model.card.name!r} writes no text: call Classify or Embed")
        with self._counted(model):
            yield model

    @contextmanager
    def use_pooled(self, name: str, version: str) -> Iterator[PooledModel]:
        model = self.find(name, version, pooled=True)
        if not isinstance(model, PooledModel):
            raise InvalidRequest(f"model {model.card.name!r} neither classifies nor embeds: it writes text")
        with self._counted(model):
            yield model

    @contextmanager
    def _counted(self, model: Model) -> Iterator[None]:
        began, answered = time.monotonic(), False
        try:
            yield
            answered = True
        finally:
            card = model.card
            self.called(card.name, str(card.version), time.monotonic() - began, answered)

    @contextmanager
    def use_translator(self, name: str, version: str) -> Iterator[Translator]:
        with self.use(name, version) as model:
            if not isinstance(model, Translator):
                raise InvalidRequest(
                    f"model {model.card.name!r} does not translate: it continues a prompt, call Generate"
                )
            yield model

    @contextmanager
    def use_generator(self, name: str, version: str) -> Iterator[Generator]:
        with self.use(name, version) as model:
            if not isinstance(model, Generator):
                raise InvalidRequest(f"model {model.card.name!r} is no language model: it translates, call Translate")
            yield model

    def find(self, name: str, version: str, pooled: bool = False) -> Model:
        """An empty name means the default model, or the only one that writes, or that is `pooled`; an empty version the
        newest."""
        if not name:
            name = self._default_name(pooled)
        versions = self._by_name.get(name)
        if versions is None:
            raise ModelNotFound(f"there is no model {name[:100]!r} here; there is {self._names()}")
        if not version:
            return list(versions.values())[-1]
        if version not in versions:
            raise ModelNotFound(f"model {name!r} has no version {version[:20]!r} here; there is {', '.join(versions)}")
        return versions[version]

    def _default_name(self, pooled: bool) -> str:
        if self._default is not None and self._is_pooled(self._default) == pooled:
            return self._default
        names = [name for name in self._by_name if self._is_pooled(name) == pooled]
        if not names:
            raise ModelNotFound(f"no model here can {'classify or embed' if pooled else 'write text'}")
        if len(names) != 1:
            raise ModelNotFound(
                f"the request names no model, and there are several: {self._names()}; "
                "name one (--model), or serve with --default-model"
            )
        return names[0]

    def _is_pooled(self, name: str) -> bool:
        return isinstance(next(iter(self._by_name[name].values())), PooledModel)

    def _names(self) -> str:
        names = list(self._by_name)
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more
