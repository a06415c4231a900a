"""Bodies of requests: which kinds are read, within how many bytes, and in what time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.requests import Request

from beamline.serving.api.http.errors import Refused
from beamline.serving.api.status import StatusCode
from beamline.serving.text.host_work import TextWorkers

SMALL = 64 * 1024  # bytes of JSON that are parsed in about a millisecond; more would keep the event loop from others
_BODY_SECONDS = 30.0
_LEAST_BYTES_PER_SECOND = 16 * 1024
_BINARY = "application/octet-stream"


def check_kind(headers: Mapping[str, str], binary: bool = False) -> None:
    """Keeps web pages of other servers from using their visitors' access to this one. A browser asks before it sends
    JSON or `application/octet-stream` to another server, and is never told that it may; but a form, or what pretends to
    be one, it sends unasked. So that is taken only from what is no browser, as `curl -d` sends it.

    `binary`: tensors may stand behind the JSON."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _unsupported(f"the content-encoding is {encoding[:40]!r}; send the body as it is, without compression")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or (binary and kind == _BINARY):
        return
    by_page = "origin" in headers or headers.get("sec-fetch-site", "none") != "none"
    if by_page or kind not in ("", "application/x-www-form-urlencoded"):
        also = f", or {_BINARY} where tensors stand behind it" if binary else ""
        raise _unsupported(f"the content-type is {kind[:40]!r}; it must be application/json{also}")


def _unsupported(sentence: str) -> Refused:
    return Refused(sentence, 415, StatusCode.INVALID_ARGUMENT, "invalid")


def _nothing(size: int) -> None:
    pass


async def read_body(request: Request, max_bytes: int, came: Callable[[int], None] = _nothing) -> bytes:
    """Within a limit of bytes, and of time: whoever sends slowly gets more of it for what has come. `came` is called
    with the size so far, for each part. Raises `Refused`."""
    parts, size = [], 0
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began + _BODY_SECONDS) as limit:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    sentence = (
                        f"the body is larger than {max_bytes} bytes, the most that is allowed: send it in several"
                    )
                    raise Refused(sentence, 413, StatusCode.RESOURCE_EXHAUSTED, "too_large")
                came(size)
                parts.append(part)
                limit.reschedule(began + _BODY_SECONDS + size / _LEAST_BYTES_PER_SECOND)
    except TimeoutError:
        sentence = f"the body did not arrive in time: {size} bytes in {_BODY_SECONDS:g} s and more"
        raise Refused(sentence, 408, StatusCode.DEADLINE_EXCEEDED, "too_slow") from None
    return b"".join(parts)


class PendingBody:
    """What has come of a request's body counts among the large requests that are here, until it is parsed."""

    def __init__(self, workers: TextWorkers) -> None:
        self._workers = workers
        self._reserved = 0

    async def __aenter__(self) -> PendingBody:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._workers.release(self._reserved)

    async def read(self, request: Request, max_bytes: int) -> bytes:
        return await read_body(request, max_bytes, self._reserve)

    def _reserve(self, size: int) -> None:
        if size > SMALL:
            self._workers.reserve(size - self._reserved)
            self._reserved = size
