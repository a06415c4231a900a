"""The log on standard error, as plain text or as JSON. Every line has the id of its request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum

from beamline.serving.contract.call import current_call

ACCESS = "beamline.access"  # the logger of the access log: one line per call


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


LEVELS = ("debug", "info", "warning", "error")


# Their lines are caused by whoever can reach a port, as many as they like.
_CAUSED_FROM_OUTSIDE = (
    "uvicorn.error",
    "asyncio",
    "beamline.serving.api.http.connections",
    "beamline.serving.security.attempts",
)


class OncePerSecond(logging.Filter):
    """Of each kind of line that anybody can cause, one a second, with the number of those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next: dict[tuple[str, str], float] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in _CAUSED_FROM_OUTSIDE:
            return True
        kind = (record.name, str(record.msg)[:100])
        now = self._clock()
        if now < self._next.get(kind, now):
            self._left_out[kind] += 1
            return False
        self._next[kind] = now + 1.0
        if left_out := self._left_out.pop(kind, 0):
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it)", None
        return True


def configure(form: LogFormat, level: str, access: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(OncePerSecond())
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(ACCESS).setLevel(logging.INFO if access else logging.WARNING)


def request_id_in(record: logging.LogRecord) -> str | None:
    """The id that the record was given, or that of the call in whose task it was logged."""
    found: str = getattr(record, "request_id", None) or current_call().request_id
    return None if found == "-" else found


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        request_id = request_id_in(record)
        return text if request_id is None or request_id in text else f"{text} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """One object per line. `fields` given as `extra` become keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := request_id_in(record)) is not None:
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
