"""An answer of any kind, as far as it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reply:
    """`token_times`: when each piece of a streamed answer arrived, by `time.monotonic`; empty for one that came
    whole."""

    status: int
    detail: str = ""
    source_tokens: int = 0
    target_tokens: int = 0
    server_queue: float = float("nan")
    token_times: Sequence[float] = ()
