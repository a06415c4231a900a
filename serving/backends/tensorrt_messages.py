"""What TensorRT says, and what that means. Why it refused something is told to its logger only."""

from __future__ import annotations

import logging
import threading
from typing import Any

log = logging.getLogger(__name__)

# What the library says of a plan of another release or GPU, and of something that is not a plan. Where it says anything
# else (memory, the driver), the next plan would not load either.
_OF_THE_PLAN = ("rebuild", "incompatible with", "version tag", "magic tag")
_LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}
_MOST_ERRORS = 10  # that are kept

_listeners: dict[str, Any] = {}
_making = threading.Lock()


class _Heard(threading.local):
    """By each thread: engines of several GPUs, and a model that is being loaded, call the library at once."""

    def __init__(self) -> None:
        self.errors: list[str] = []


def listener_of(library: Any, name: str) -> Any:
    """The one logger of the library for this process, which is never let go of: the library keeps a pointer to the
    first one that it is given, and ignores later ones."""
    with _making:
        if name not in _listeners:
            _listeners[name] = _make_listener(library)
        return _listeners[name]


def _make_listener(library: Any) -> Any:
    class Listener(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self._heard = _Heard()

        def forget(self) -> None:
            """Before a call of which it will be asked why it failed."""
            self._heard.errors.clear()

        @property
        def errors(self) -> list[str]:
            """Since then, of this thread."""
            return self._heard.errors

        def log(self, severity: Any, message: str) -> None:
            level = _LEVELS.get(severity.name, logging.DEBUG)
            if level == logging.ERROR:
                self._heard.errors = [*self._heard.errors[1 - _MOST_ERRORS :], message]
            log.log(level, "%s", message)

    return Listener()


def together(errors: list[str]) -> str:
    """The cause is not always the last of them."""
    return "; ".join(errors) or "it does not say why"


def rebuild_helps(why: str) -> bool:
    return any(words in why.lower() for words in _OF_THE_PLAN)
