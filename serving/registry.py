"""The models that are loaded. A name from a request is only ever a key here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from serving.errors import ModelNotFound
from serving.text.translator import Translator

_MOST_NAMES = 20  # in an error message


class Models:
    def __init__(self, translators: Iterable[Translator], default: str | None = None) -> None:
        # Told of every call that used a model: its name and version, the seconds it took, and if it was answered.
        self.called: Callable[[str, str, float, bool], None] = lambda name, version, seconds, answered: None
        self._by_name: dict[str, dict[str, Translator]] = {}
        for translator in sorted(translators, key=lambda each: (each.card.name, each.card.version)):
            versions = self._by_name.setdefault(translator.card.name, {})
            versions[str(translator.card.version)] = translator
        if default is not None and default not in self._by_name:
            raise ModelNotFound(f"the default model {default!r} is not among the loaded ones: {self._names()}")
        self._default = default

    def __iter__(self) -> Iterator[Translator]:
        """By name, then by version."""
        return (translator for versions in self._by_name.values() for translator in versions.values())

    @contextmanager
    def use(self, name: str, version: str) -> Iterator[Translator]:
        """Around everything that a call does with a model."""
        translator = self.find(name, version)
        began, answered = time.monotonic(), False
        try:
            yield translator
            answered = True
        finally:
            card = translator.card
            self.called(card.name, str(card.version), time.monotonic() - began, answered)

    def find(self, name: str, version: str) -> Translator:
        """An empty name means the default model, or the only one; an empty version the newest."""
        if not name:
            name = self._default_name()
        versions = self._by_name.get(name)
        if versions is None:
            raise ModelNotFound(f"there is no model {name[:100]!r} here; there is {self._names()}")
        if not version:
            return list(versions.values())[-1]
        if version not in versions:
            raise ModelNotFound(f"model {name!r} has no version {version[:20]!r} here; there is {', '.join(versions)}")
        return versions[version]

    def _default_name(self) -> str:
        if self._default is not None:
            return self._default
        if len(self._by_name) != 1:
            raise ModelNotFound(
                f"the request names no model, and there are several: {self._names()}; "
                "name one (--model), or serve with --default-model"
            )
        return next(iter(self._by_name))

    def _names(self) -> str:
        names = list(self._by_name)
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more
