"""Trace files: JSON lines, `{"time": 0.25, "text": "...", "model": "en-de", "options": {"beam_size": 4}}`.

`time` is in seconds, from any zero; `model` and `options` may be left out.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.arrivals import Replay
from beamline.loadtest.load.texts import read_lines
from beamline.loadtest.load.workload import TraceWorkload
from beamline.loadtest.targets.target import Request


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    time: float = Field(allow_inf_nan=False)
    text: str
    model: str | None = None
    options: dict[str, str | bool | int | float] = {}


def read_trace(path: Path, model: str, speed: float) -> tuple[Replay, TraceWorkload]:
    """The arrival times and the requests of a trace; `model` is for the lines that name none."""
    lines = [_parsed(path, number, line) for number, line in enumerate(read_lines(path), start=1)]
    if not lines:
        raise LoadTestError(f"{path} holds no request")
    lines.sort(key=lambda line: line.time)
    began = lines[0].time
    requests = tuple(
        Request(number, line.text, model if line.model is None else line.model, _options(line))
        for number, line in enumerate(lines)
    )
    return Replay(tuple(line.time - began for line in lines), speed), TraceWorkload(requests)


def _parsed(path: Path, number: int, line: str) -> _Line:
    try:
        return _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise LoadTestError(f"{path}, request {number}: {reason}") from error


def _options(line: _Line) -> tuple[tuple[str, str], ...]:
    return tuple((name, _as_text(value)) for name, value in sorted(line.options.items()))


def _as_text(value: str | bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
