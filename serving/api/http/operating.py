"""What the studio shows besides the models' answers: the repository, certificates, the last ten minutes, the batch.

GET  /v1/repository                               every model and version, with its state
POST /v1/repository/{name}/load, .../unload       needs the scope `admin`
GET  /v1/repository/{name}/{version}/certificate  parity.json of a version
GET  /v1/live                                     the last ten minutes, by model
GET  /v1/live/batch                               who has which slot since when, without texts; needs `admin`
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from beamline.serving.api.guard import CallRecord, Guard
from beamline.serving.api.http.body import read_body
from beamline.serving.api.http.call import address_of
from beamline.serving.api.http.errors import failure_response
from beamline.serving.contract.call import REQUEST_ID, with_request_id
from beamline.serving.engine.core import Engine
from beamline.serving.engine.replicas import Replicas
from beamline.serving.errors import InvalidRequest, ModelNotFound
from beamline.serving.models.loader import ServedModel
from beamline.serving.models.manager import ModelManager
from beamline.serving.telemetry.history import BIN_SECONDS, BINS, History, ModelHistory, resident_bytes

_READ = "/beamline.v1.Inference/ListModels"  # no gRPC method, but it needs the scope of those
_LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
_UNLOAD = "/inference.GRPCInferenceService/RepositoryModelUnload"
_BATCH = "/beamline.v1.Operating/Batch"  # of a service that is not listed: it needs the scope `admin`
_BATCH_SECONDS = 60.0
_MOST_BYTES = 1024  # of the body of a POST, which is an empty object
_NO_CERTIFICATE = "this version has no certificate: it was not made by `beamline convert`"

# For the OpenAPI description: what each answers with.
DESCRIPTIONS = {
    ("get", "/v1/repository"): ("Every model and version of the repository, with its state and why", "models"),
    ("post", "/v1/repository/{name}/load"): (
        "Load a model, or what changed of it; needs the scope admin",
        "models",
    ),
    ("post", "/v1/repository/{name}/unload"): ("Unload a model; needs the scope admin", "models"),
    ("get", "/v1/repository/{name}/{version}/certificate"): ("A version's parity.json", "models"),
    ("get", "/v1/live"): ("The last ten minutes of every model, in bins of two seconds", "operations"),
    ("get", "/v1/live/batch"): ("Who has which slot since when, without texts; needs the scope admin", "operations"),
}

Answer = Callable[[Request, ModelManager], Awaitable[Any]]


def routes(manager: Callable[[], ModelManager], repository: Path | None, history: History, guard: Guard) -> list[Route]:
    """`manager` raises `ShuttingDown` while there is none."""

    def route(path: str, scope: str, answer: Answer, method: str = "GET") -> Route:
        return Route(path, _handler(f"{method} {path}", scope, answer, manager, guard), methods=[method])

    async def index(request: Request, manager: ModelManager) -> Any:
        return {"models": [{**asdict(each), "state": each.state.value} for each in manager.index()]}

    async def load(request: Request, manager: ModelManager) -> Any:
        await _check_body(request)
        await manager.load(request.path_params["name"])
        return await index(request, manager)

    async def unload(request: Request, manager: ModelManager) -> Any:
        await _check_body(request)
        await manager.unload(request.path_params["name"])
        return await index(request, manager)

    async def certificate(request: Request, manager: ModelManager) -> Any:
        name, version = request.path_params["name"], request.path_params["version"]
        if not any((each.name, each.version) == (name, version) for each in manager.index()):
            raise ModelNotFound(f"there is no version {version[:20]!r} of a model {name[:100]!r} here")
        file = Path() if repository is None else repository / name / version / "parity.json"
        if repository is None or not file.is_file():
            raise ModelNotFound(_NO_CERTIFICATE)
        return json.loads(file.read_text(encoding="utf-8"))

    async def live(request: Request, manager: ModelManager) -> Any:
        return {
            "bin_seconds": BIN_SECONDS,
            "bins": BINS,
            "memory": resident_bytes(),
            "models": [_past(each, history.of(each.label)) for each in manager.everything()],
        }

    async def batch(request: Request, manager: ModelManager) -> Any:
        models = [_batch(each, history.of(each.label)) for each in manager.everything()]
        return {"seconds": _BATCH_SECONDS, "models": models}

    # A version is text here: as a number, one of thousands of digits would fail in the router, before any check.
    return [
        route("/v1/repository", _READ, index),
        route("/v1/repository/{name}/load", _LOAD, load, "POST"),
        route("/v1/repository/{name}/unload", _UNLOAD, unload, "POST"),
        route("/v1/repository/{name}/{version}/certificate", _READ, certificate),
        route("/v1/live", _READ, live),
        route("/v1/live/batch", _BATCH, batch),
    ]


def _handler(
    label: str, scope: str, answer: Answer, manager: Callable[[], ModelManager], guard: Guard
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        headers = with_request_id(request.headers)
        request_id = headers[REQUEST_ID]
        with guard.record(label, headers) as record:
            try:
                return JSONResponse(await _answered(request, record), headers={"cache-control": "no-store"})
            except Exception as error:
                status, response = failure_response(guard, error, label, request_id)
                record.code = status.code
                return response

    async def _answered(request: Request, record: CallRecord) -> Any:
        client = guard.authenticate(scope, request.headers, address_of(request))
        record.client = None if client.name is None else f"token:{client.name}"
        return await answer(request, manager())

    return handle


async def _check_body(request: Request) -> None:
    """An empty object, as JSON: browsers send that content type to another host's server only where that allows it."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InvalidRequest("send the header 'content-type: application/json', and an empty object")
    if b"".join((await read_body(request, _MOST_BYTES)).split()) != b"{}":
        raise InvalidRequest("the body must be an empty object, {}: all that is asked for stands in the path")


def _named(served: ServedModel) -> dict[str, Any]:
    return {"name": served.manifest.name, "version": str(served.version), "slots": served.slots}


def _past(served: ServedModel, history: ModelHistory) -> dict[str, Any]:
    return {**_named(served), "points": [asdict(point) for point in history.points()]}


def _batch(served: ServedModel, history: ModelHistory) -> dict[str, Any]:
    """Times are seconds ago."""
    now = time.monotonic()
    engine = served.engine
    occupied = engine.occupied() if isinstance(engine, Engine | Replicas) else []
    running = [
        {
            "slot": e.slot,
            "began": now - e.since,
            "ended": None if e.until is None else now - e.until,  # it moved from there to another slot
            "beams": e.beams,
            "tokens": e.tokens,
        }
        for e in occupied
    ]
    finished = [
        {"slot": e.slot, "began": now - e.began, "ended": now - e.ended, "tokens": e.tokens, "outcome": e.outcome.value}
        for e in history.finished(_BATCH_SECONDS)
    ]
    return {**_named(served), "running": running, "finished": finished}
