"""The two HTTP applications: metrics and health for operators; gateway, OpenAPI and the studio for clients."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from prometheus_client.exposition import gzip_accepted
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from beamline.serving.api.guard import Guard
from beamline.serving.api.http import gateway as v1
from beamline.serving.api.http import pages
from beamline.serving.api.http.call import Gateway, address_of
from beamline.serving.api.http.errors import failure_response, routing_error
from beamline.serving.api.http.open_inference import routes as v2
from beamline.serving.api.http.openapi import openapi
from beamline.serving.api.inference import SERVICE, Inference
from beamline.serving.api.open_inference.methods import OpenInference
from beamline.serving.contract.call import REQUEST_ID, with_request_id
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.errors import RequestError
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.models.registry import Models
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.text.model_card import ModelCard

_OPERATIONS = "this port has /metrics and /healthz; calls go to --http-port (8000) or, over gRPC, --grpc-port (8001)"
_LIST_MODELS = f"/{SERVICE}/ListModels"  # no gRPC method, but it needs the scope of those


def operations_app(metrics: Metrics, lifecycle: Lifecycle, guard: Guard | None = None) -> Starlette:
    """For operators. With a guard, the metrics need a token."""

    async def show_metrics(request: Request) -> Response:
        if guard is not None and (refused := _refused(guard, _LIST_MODELS, request)) is not None:
            return refused
        content, content_type = metrics.negotiated(request.headers.get("accept", ""))
        headers = {"content-type": content_type, "vary": "accept, accept-encoding"}
        if gzip_accepted(request.headers.get("accept-encoding", "")):
            content, headers["content-encoding"] = gzip.compress(content, compresslevel=1), "gzip"
        return Response(content, headers=headers)

    return Starlette(
        routes=[Route("/metrics", show_metrics), *_health(lifecycle)],
        exception_handlers={HTTPException: partial(routing_error, hint=_OPERATIONS)},
    )


def gateway_app(
    gateway: Gateway,
    inference: Inference,
    open_inference: OpenInference,
    models: Models,
    max_inputs: int,
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """For clients; `more` is what else the server has to tell."""

    async def list_models(request: Request) -> Response:
        if (refused := _refused(gateway.guard, _LIST_MODELS, request)) is not None:
            return refused
        return JSONResponse({"models": list(_cards(models))})

    async def description(request: Request) -> Response:
        return JSONResponse(openapi(max_inputs))

    return Starlette(
        routes=[
            *v1.routes(gateway, inference),
            Route("/v1/models", list_models),
            *v2.routes(gateway, open_inference),
            Route("/openapi.json", description),
            *more,
            *pages.routes(),
            *_health(gateway.lifecycle),
        ],
        exception_handlers={HTTPException: routing_error},
    )


def _health(lifecycle: Lifecycle) -> list[Route]:
    async def live(request: Request) -> Response:
        if lifecycle.live:
            return PlainTextResponse("ok")
        return PlainTextResponse(lifecycle.describe, status_code=503)

    async def ready(request: Request) -> Response:
        if lifecycle.ready:
            return PlainTextResponse("ok")
        return PlainTextResponse(lifecycle.describe, status_code=503)

    return [Route("/healthz", ready), Route("/healthz/ready", ready), Route("/healthz/live", live)]


def _refused(guard: Guard, method: str, request: Request) -> Response | None:
    headers = with_request_id(request.headers)
    try:
        guard.authenticate(method, headers, address_of(request))
    except RequestError as error:
        return failure_response(guard, error, request.url.path, headers[REQUEST_ID])[1]
    return None


def _cards(models: Models) -> Iterable[dict[str, Any]]:
    default = models.default()
    for model in models.everything():
        card = model.card
        named: dict[str, Any] = {"name": card.name, "version": str(card.version)}
        if model is default:  # what a call that names none uses
            named["default"] = True
        if isinstance(card, PooledManifest):
            yield {**named, "task": card.task, "labels": list(card.labels)}
            continue
        yield {
            **named,
            "task": "translate" if card.translates else "generate",
            "source_languages": list(card.source_languages),
            "target_languages": list(card.target_languages),
            **_languages(card),
            "feature_width": card.feature_width,  # it reads vectors of so many values; 0: text
            "chat": card.chat_template is not None,
            "limits": card.limits.model_dump(mode="json"),
            "defaults": card.defaults.model_dump(mode="json", exclude_none=True),
        }


def _languages(card: ModelCard) -> dict[str, Any]:
    """Of a model that knows several: BCP-47's tags by its codes, and what a request means that names none."""
    known = card.languages
    if known is None:
        return {}
    return {
        "language_tags": {each.code: each.bcp47 for each in (*known.source, *known.target) if each.bcp47},
        "default_source_language": known.default_source,
        "default_target_language": known.default_target,
    }
