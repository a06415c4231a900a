"""The languages that a request names, as the tokens by which a model is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamline.serving.contract.manifest import Language
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import ModelCard

_SHOWN = 30  # languages in a message


@dataclass(frozen=True, slots=True)
class Direction:
    """What stands around a source that is text, and how its translation begins. Token ids are taken as they are."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    forced_bos_id: int | None = None
    start_id: int | None = None
    wanted: str = ""  # what is wrong with a source that does not begin with a language itself, where one must

    @property
    def length(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, ids: Sequence[int]) -> tuple[int, ...]:
        return (*self.before, *ids, *self.after)


class LanguageReader:
    """Pure and synchronous: it may run on any thread."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        known = card.languages
        self._known = known
        self._sources = _by_name(known.source) if known else {}
        self._targets = _by_name(known.target) if known else {}
        self._target_ids = frozenset(language.id for language in known.target) if known else frozenset()

    def read(self, source: str, target: str, *, text: bool = True) -> Direction:
        """`text`: whether there are sources that are not token ids already."""
        known = self._known
        if known is None:
            self._one_of("source_language", source, self._card.source_languages)
            self._one_of("target_language", target, self._card.target_languages)
            return Direction()
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        if not known.source:
            self._one_of("source_language", source, self._card.source_languages)
        elif text or source:
            token = self._token("source_language", source or known.default_source or "", self._sources, known.source)
            before, after = ((token,), ()) if known.source_place == "before" else ((), (token,))
        asked = target or known.default_target or ""
        if known.target_place == "source":
            if not asked:
                return Direction(before, after, wanted=self._missing("target_language", known.target) if text else "")
            token = self._token("target_language", asked, self._targets, known.target)
            return Direction((token, *before), after)
        token = self._token("target_language", asked, self._targets, known.target)
        if known.target_place == "start":
            return Direction(before, after, start_id=token)
        return Direction(before, after, forced_bos_id=token)

    def completed(self, direction: Direction, where: str, ids: Sequence[int]) -> Direction:
        """Of a text whose target language no field names: it may begin with its token itself, as `>>deu<<`. For what is
        split off behind it, that is the language, too."""
        if not direction.wanted:
            return direction
        if not ids or ids[0] not in self._target_ids:
            raise InvalidRequest(f"{direction.wanted}, or begin {where} with its token")
        return Direction((ids[0], *direction.before), direction.after)

    def _token(self, field: str, asked: str, known: dict[str, Language], all_of_them: Sequence[Language]) -> int:
        if not asked:
            raise InvalidRequest(self._missing(field, all_of_them))
        found = known.get(asked.lower())
        if found is None:
            known_ones = _listed(all_of_them, asked)
            raise InvalidRequest(f"{field} is {asked[:40]!r}; model {self._card.name} knows {known_ones}")
        return found.id

    def _missing(self, field: str, known: Sequence[Language]) -> str:
        return f"{field} is missing; model {self._card.name} knows {_listed(known)}: name one"

    def _one_of(self, field: str, asked: str, known: Sequence[str]) -> None:
        """Of a model that reads no such token: naming its one language is allowed, and changes nothing."""
        if not asked or asked in known:
            return
        if not known:
            raise InvalidRequest(
                f"{field} is {asked[:40]!r}, but model {self._card.name} has no choice of languages: leave it empty"
            )
        raise InvalidRequest(f"{field} is {asked[:40]!r}; model {self._card.name} knows {', '.join(known)}")


def _by_name(languages: Sequence[Language]) -> dict[str, Language]:
    """By standard tag and by the checkpoint's code, which wins; in small letters."""
    tags = {language.bcp47.lower(): language for language in languages if language.bcp47}
    return tags | {language.code.lower(): language for language in languages}


def _listed(languages: Sequence[Language], asked: str = "") -> str:
    """What begins as the one that was asked for comes first. A message is too short for two hundred of them."""
    begins = asked[:2].lower()
    near_first = sorted(languages, key=lambda each: not (begins and each.code.lower().startswith(begins)))
    shown = ", ".join(
        f"{each.code} ({each.bcp47})" if each.bcp47 and each.bcp47 != each.code else each.code
        for each in near_first[:_SHOWN]
    )
    more = len(languages) - _SHOWN
    return f"{shown} and {more} more (GET /v1/models lists all)" if more > 0 else shown
