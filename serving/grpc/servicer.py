"""The methods of `beamline.v1.Inference`: find the model, pass the call on."""

from __future__ import annotations

import time
from typing import Any

from protos import beamline_pb2 as pb
from protos import beamline_pb2_grpc
from serving.lifecycle import Lifecycle
from serving.registry import Models


class InferenceServicer(beamline_pb2_grpc.InferenceServicer):  # type: ignore[misc, unused-ignore]
    def __init__(self, models: Models, lifecycle: Lifecycle) -> None:
        self._models = models
        self._lifecycle = lifecycle

    async def Translate(self, request: pb.TranslateRequest, context: Any) -> pb.TranslateResponse:
        with self._lifecycle.call(), self._models.use(request.model, request.version) as model:
            return await model.translate(request, _deadline(context))


def _deadline(context: Any) -> float | None:
    """The caller's deadline on the engine's clock."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
