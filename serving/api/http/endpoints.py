"""The HTTP endpoints of `beamline.v1.Inference`, each with the methods that answer it."""

from __future__ import annotations

from dataclasses import dataclass

from beamline.serving.api.inference import METHODS, Method

TIMEOUT = "x-beamline-timeout-ms"  # a header: the deadline, which gRPC has a field of its own for


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`unary` and `stream` take the same request."""

    path: str
    unary: Method  # one JSON response
    stream: Method | None = None  # server-sent events, for clients that accept them


ENDPOINTS = (
    Endpoint("/v1/translate", METHODS["Translate"], METHODS["TranslateStream"]),
    Endpoint("/v1/generate", METHODS["GenerateOnce"], METHODS["Generate"]),
    Endpoint("/v1/score", METHODS["Score"]),
    Endpoint("/v1/classify", METHODS["Classify"]),
    Endpoint("/v1/embed", METHODS["Embed"]),
)
