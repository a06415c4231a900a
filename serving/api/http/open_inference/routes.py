"""The routes below /v2: each is a method of the protocol, guarded, limited and counted as every call is.

Health needs no token, as it doesn't at /healthz; all else needs what the method needs over gRPC.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.http.call import Gateway, HttpCall
from beamline.serving.api.http.errors import open_inference_error_body
from beamline.serving.api.http.open_inference.messages import (
    HEADER_LENGTH,
    InferCall,
    plain,
    read_change,
    read_index,
    read_infer,
    write_infer,
    write_json,
)
from beamline.serving.api.open_inference.methods import SERVICE, OpenInference
from beamline.serving.contract.call import header_number
from beamline.serving.lifecycle import Lifecycle

VERSION = "/versions/{version}"  # may stand behind a model's name
_MAX_LENGTH = 10**9 - 1

Read = Callable[[Request, bytes], Message]  # the method's message, of path and body
Respond = Callable[[Any, float | None], Any]
Handler = Callable[[Request], Awaitable[Response]]
Reply = TypeVar("Reply", bound=Message)


def routes(gateway: Gateway, methods: OpenInference) -> list[Route]:
    def handler(
        label: str, method: str, read: Read, write: Callable[[Any], Any] = plain, respond: Respond | None = None
    ) -> Handler:
        """`write`: what is sent as JSON."""

        async def handle(request: Request) -> Response:
            call = _call(gateway, request, label, method)
            message = await call.admit(partial(read, request), binary=True)
            if isinstance(message, Response):
                return message
            answer = (respond or getattr(methods, method))(message, call.deadline)
            return await call.unary(answer, lambda reply: _json(write_json(write(reply))))

        return handle

    def of_model(verb: str, rest: str, handle: Handler) -> list[Route]:
        """With the version in the path, and without."""
        paths = (f"/v2/models/{{name}}{rest}", f"/v2/models/{{name}}{VERSION}{rest}")
        return [Route(path, handle, methods=[verb]) for path in paths]

    def described(rest: str, method: str, kind: type[Message], **how: Any) -> list[Route]:
        return of_model("GET", rest, handler(f"GET /v2/models/{{name}}{rest}", method, partial(_named, kind), **how))

    async def ready(request: oip.ModelReadyRequest, deadline: float | None) -> oip.ModelReadyRequest:
        methods.check_ready(request)
        return request

    async def infer(request: Request) -> Response:
        call = _call(gateway, request, "POST /v2/models/{name}/infer", "ModelInfer")
        asked = await call.admit(partial(_infer, request), binary=True)
        if isinstance(asked, Response):
            return asked
        return await call.unary(methods.ModelInfer(asked.message, call.deadline), partial(_inferred, asked))

    everything = "/v2/models/stats"  # before the models, of which none can be called so
    metadata = handler("GET /v2", "ServerMetadata", lambda request, body: oip.ServerMetadataRequest())
    statistics = handler(f"GET {everything}", "ModelStatistics", lambda request, body: oip.ModelStatisticsRequest())
    index = handler(
        "POST /v2/repository/index",
        "RepositoryIndex",
        lambda request, body: read_index(body),
        lambda reply: plain(reply)["models"],
    )
    load, unload = "/v2/repository/models/{name}/load", "/v2/repository/models/{name}/unload"
    loads = handler(f"POST {load}", "RepositoryModelLoad", partial(_change, oip.RepositoryModelLoadRequest))
    unloads = handler(f"POST {unload}", "RepositoryModelUnload", partial(_change, oip.RepositoryModelUnloadRequest))
    return [
        Route("/v2", metadata),
        *_health(gateway.lifecycle),
        Route(everything, statistics),
        *described("", "ModelMetadata", oip.ModelMetadataRequest),
        *described("/ready", "ModelReady", oip.ModelReadyRequest, write=_is_ready, respond=ready),
        *described("/config", "ModelConfig", oip.ModelConfigRequest, write=lambda reply: plain(reply.config)),
        *described("/stats", "ModelStatistics", oip.ModelStatisticsRequest),
        *of_model("POST", "/infer", infer),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route(load, loads, methods=["POST"]),
        Route(unload, unloads, methods=["POST"]),
    ]


def _call(gateway: Gateway, request: Request, label: str, method: str) -> HttpCall:
    return HttpCall(gateway, request, label, f"/{SERVICE}/{method}", open_inference_error_body)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _named(kind: Callable[..., Message], request: Request, body: bytes) -> Message:
    return kind(name=request.path_params["name"], version=request.path_params.get("version", ""))


def _is_ready(request: oip.ModelReadyRequest) -> dict[str, Any]:
    return {"name": request.name, "ready": True}


def _change(kind: Callable[..., Any], request: Request, body: bytes) -> Message:
    message: Message = kind(model_name=request.path_params["name"])
    read_change(body, message)  # type: ignore[arg-type]
    return message


def _infer(request: Request, body: bytes) -> InferCall:
    length = header_number(request.headers, HEADER_LENGTH, 0, _MAX_LENGTH)
    return read_infer(body, length, request.path_params["name"], request.path_params.get("version", ""))


def _inferred(asked: InferCall, reply: oip.ModelInferResponse) -> Response:
    head, tail = write_infer(reply, asked)
    if tail is None:
        return _json(head)
    return Response(head + tail, headers={HEADER_LENGTH: str(len(head))}, media_type="application/octet-stream")


def _health(lifecycle: Lifecycle) -> list[Route]:
    def says(name: str, holds: Callable[[], bool]) -> Handler:
        async def handle(request: Request) -> Response:
            if holds():
                return JSONResponse({name: True})
            return JSONResponse({name: False, "error": lifecycle.describe}, 503)

        return handle

    return [
        Route("/v2/health/live", says("live", lambda: lifecycle.live)),
        Route("/v2/health/ready", says("ready", lambda: lifecycle.ready)),
    ]
