"""The HTTP endpoints of `beamline.v1.Inference`, each with the methods that answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from beamline.serving.api.inference import METHODS, Method

TIMEOUT = "x-beamline-timeout-ms"  # a header: the deadline, which gRPC has a field of its own for


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`unary` and `stream` take the same request."""

    path: str
    summary: str
    unary: Method  # one JSON response
    stream: Method | None = None  # server-sent events, for clients that accept them
    example: dict[str, Any] = field(default_factory=dict, hash=False)  # a request


ENDPOINTS = (
    Endpoint(
        "/v1/translate",
        "Translate texts, or caption images by their features",
        METHODS["Translate"],
        METHODS["TranslateStream"],
        {"inputs": [{"text": "Save the file."}], "options": {"beam_size": 4, "return_scores": True}},
    ),
    Endpoint(
        "/v1/generate",
        "Continue a prompt or a chat with a language model",
        METHODS["GenerateOnce"],
        METHODS["Generate"],
        {"text": "Once upon a time", "options": {"max_tokens": 50, "temperature": 0.7}},
    ),
    Endpoint(
        "/v1/score",
        "How likely a model finds given texts, token by token",
        METHODS["Score"],
        example={"sources": [{"text": "Save the file."}], "texts": [{"text": "Speichern Sie die Datei."}]},
    ),
    Endpoint(
        "/v1/classify",
        "Labels with their probabilities",
        METHODS["Classify"],
        example={"inputs": [{"text": "What a day."}]},
    ),
    Endpoint(
        "/v1/embed",
        "One vector per text",
        METHODS["Embed"],
        example={"inputs": [{"text": "A text."}], "normalize": True},
    ),
)
