"""What is true of every HTTP exchange, whatever its path.

A message whose length is given in two ways may be cut differently by a proxy and by us, so that a client can hide a
second request in the first: it is refused, and its connection closed. And when the server is about to end, each
response says that its connection is to be closed, so that none is lost between two requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beamline.serving.api.http.errors import error_body_at, error_response
from beamline.serving.api.status import Status, StatusCode
from beamline.serving.contract.call import REQUEST_ID, with_request_id
from beamline.serving.lifecycle import Lifecycle, Phase

_CLOSE = (b"connection", b"close")
_TWO_LENGTHS = "the request has both Content-Length and Transfer-Encoding: send one of them"


class Framing:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, refused: Callable[[str], None]) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        two_lengths = {b"content-length", b"transfer-encoding"} <= names
        if two_lengths or self._lifecycle.phase in (Phase.LEAVING, Phase.DRAINING, Phase.FAILED):
            send = _closing(send)
        if not two_lengths:
            await self._app(scope, receive, send)
            return
        self._refused("invalid")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status = Status(StatusCode.INVALID_ARGUMENT, _TWO_LENGTHS)
        response = error_response(status, with_request_id(headers)[REQUEST_ID], body=error_body_at(scope))
        await response(scope, receive, send)


def _closing(send: Send) -> Send:
    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = [*message.get("headers", ()), _CLOSE]
            message = {**message, "headers": headers}
        await send(message)

    return send_and_close
