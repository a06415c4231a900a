"""One model on several devices: an engine on each, and every request goes to the least busy one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from serving.engine.core import Engine
from serving.engine.request import Request
from serving.engine.scoring import ScoringRequest
from serving.errors import Overloaded


class Fleet:
    """To the doors it is an engine. Its members are driven by a thread per device."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        first = self.engines[0]
        self.manifest, self.plan = first.manifest, first.plan
        self.reserved_bytes = sum(engine.reserved_bytes for engine in self.engines)
        self._lock = threading.Lock()
        self._turn = 0

    def submit(self, request: Request) -> None:
        """Where one is full, the next may not be: only when all are is the request refused."""
        refusal: Overloaded | None = None
        for engine in self._least_loaded():
            try:
                return engine.submit(request)
            except Overloaded as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def score(self, request: ScoringRequest) -> None:
        self._least_loaded()[0].score(request)

    def enough(self, request_id: int, index: int = 0) -> None:
        for engine in self.engines:
            engine.enough(request_id, index)

    def cancel(self, request_id: int) -> None:
        for engine in self.engines:  # those that don't know it ignore it
            engine.cancel(request_id)

    def _least_loaded(self) -> list[Engine]:
        """Least first; among equals in turn, so that an idle fleet is used evenly."""
        with self._lock:
            self._turn = (self._turn + 1) % len(self.engines)
            rotated = [*self.engines[self._turn :], *self.engines[: self._turn]]
        return sorted(rotated, key=lambda engine: engine.load)
