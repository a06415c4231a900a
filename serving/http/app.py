"""What the HTTP port answers."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serving.lifecycle import Lifecycle
from serving.metrics import Metrics


def build_app(metrics: Metrics, lifecycle: Lifecycle) -> Starlette:
    async def show_metrics(request: Request) -> Response:
        return Response(metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(request: Request) -> Response:
        if lifecycle.ready:
            return PlainTextResponse("ok")
        return PlainTextResponse(lifecycle.phase.value, status_code=503)

    return Starlette(routes=[Route("/metrics", show_metrics), Route("/healthz", healthz)])
