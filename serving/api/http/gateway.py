"""`beamline.v1.Inference` for clients that send JSON: the same methods, the same guard, protobuf's own JSON.

POST /v1/translate                              one JSON response
POST /v1/translate, Accept: text/event-stream   server-sent events: one for each reply, then `event: end`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from beamline.serving.api.http.call import Gateway, HttpCall
from beamline.serving.api.http.endpoints import ENDPOINTS, Endpoint
from beamline.serving.api.http.json_messages import from_json, to_json
from beamline.serving.api.inference import Inference


def routes(gateway: Gateway, inference: Inference) -> list[Route]:
    return [Route(endpoint.path, _handler(endpoint, gateway, inference), methods=["POST"]) for endpoint in ENDPOINTS]


def _handler(endpoint: Endpoint, gateway: Gateway, inference: Inference) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        streams = "text/event-stream" in request.headers.get("accept", "")
        method = endpoint.stream if streams and endpoint.stream is not None else endpoint.unary
        call = HttpCall(gateway, request, f"POST {endpoint.path}", method.full_name)
        message = await call.admit(partial(from_json, kind=method.request))
        if isinstance(message, Response):
            return message
        answers = getattr(inference, method.name)(message, call.deadline)
        return await (call.stream(answers, _json) if method.streams else call.unary(answers, _response))

    return handle


def _json(reply: Message) -> bytes:
    return to_json(reply).encode()


def _response(reply: Message) -> Response:
    return Response(_json(reply), media_type="application/json")
