"""What travels with a call besides its message: the client, its priority, and the id that every log line has.

    x-request-id                  letters, digits and ._- (at most 64); made up where it is missing or not that
    x-beamline-priority           0 (most urgent) to 3; 1 where it is missing
    x-beamline-queue-timeout-ms   how long the call's sequences may wait for a slot; without it, as long as the deadline

They are gRPC metadata and HTTP headers alike: they work with every method and every client, and a proxy can set them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from beamline.serving.errors import InvalidRequest

REQUEST_ID = "x-request-id"
PRIORITY = "x-beamline-priority"
QUEUE_TIMEOUT = "x-beamline-queue-timeout-ms"

LOWEST_PRIORITY = 3
DEFAULT_PRIORITY = 1
MOST_MILLISECONDS = 24 * 3600 * 1000
_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NUMBER = re.compile(r"[0-9]{1,9}")


Sequences = Sequence[tuple[float, float, float, float]]


def _nothing(finished: Sequences) -> None:
    pass


def _nobody(model: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Call:
    request_id: str = "-"
    client: str = "-"
    priority: int = DEFAULT_PRIORITY
    queue_timeout: float | None = None  # seconds
    # Called with the sequences that were decoded: when each ended, and its seconds in queue, encoder and slot.
    report: Callable[[Sequences], None] = _nothing
    # Called with the name of the model that answers.
    answered_by: Callable[[str], None] = _nobody

    @property
    def tenant(self) -> str:
        """Whose call it is: the holder of its token or certificate. Where there are none, everyone is one tenant."""
        return self.client if self.client.startswith(("token:", "certificate:")) else ""


_NO_CALL = Call()
_current: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def current_call() -> Call:
    """The call that this task works for."""
    return _current.get()


def enter(call: Call) -> None:
    """For the rest of this task, which must be the call's own."""
    _current.set(call)


def with_request_id(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with a valid request id, made up if there was none. Every API begins with it."""
    given = headers.get(REQUEST_ID, "")
    return {**headers, REQUEST_ID: given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex[:16]}


def call_of(
    headers: Mapping[str, str],
    client: str,
    report: Callable[[Sequences], None] = _nothing,
    answered_by: Callable[[str], None] = _nobody,
) -> Call:
    """Raises `InvalidRequest` for a priority or a timeout out of range."""
    milliseconds = header_number(headers, QUEUE_TIMEOUT, 1, MOST_MILLISECONDS)
    priority = header_number(headers, PRIORITY, 0, LOWEST_PRIORITY)
    return Call(
        headers[REQUEST_ID],
        client,
        DEFAULT_PRIORITY if priority is None else priority,
        None if milliseconds is None else milliseconds / 1000,
        report,
        answered_by,
    )


def header_number(headers: Mapping[str, str], name: str, lowest: int, highest: int) -> int | None:
    """None where it is missing; raises `InvalidRequest` where it is no such number."""
    text = headers.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or not lowest <= int(text) <= highest:
        raise InvalidRequest(f"{name} is {text[:20]!r}; it must be a whole number from {lowest} to {highest}")
    return int(text)
