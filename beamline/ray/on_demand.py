"""Models that are loaded when a call asks for them: `@serve.multiplexed`, for many models of which few are in use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.inference import METHODS, Inference
from beamline.serving.api.open_inference.methods import OpenInference
from beamline.serving.api.open_inference.streaming import Reply
from beamline.serving.errors import Unimplemented

Ensure = Callable[[str], Awaitable[None]]

_SHARED = (
    "this is one replica of several: models are changed for all of them, in the repository (with `watch`) or in the "
    "application's configuration"
)


async def anything(model: str) -> None:
    """For replicas that have every model from the start."""


class LoadedModel:
    """What Ray keeps for a model that is loaded. It awaits `__del__` before it forgets it; as an attribute of the
    object, which Python's own collector does not call."""

    def __init__(self, unload: Callable[[], Awaitable[None]]) -> None:
        self.__del__ = unload


class OnDemand:
    """`Inference` whose methods have their model loaded first. What comes behind that uses it in the same turn of the
    event loop, so it can't be unloaded in between."""

    def __init__(self, inference: Inference, ensure: Ensure) -> None:
        self._inference = inference
        self._ensure = ensure
        self.workers = inference.workers

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)
        call = getattr(self._inference, name)

        async def unary(request: Any, deadline: float | None) -> Any:
            await self._ensure(request.model)
            return await call(request, deadline)

        async def stream(request: Any, deadline: float | None) -> AsyncGenerator[Any]:
            await self._ensure(request.model)
            async with aclosing(call(request, deadline)) as replies:
                async for reply in replies:
                    yield reply

        return stream if METHODS[name].streams else unary


class ReplicaOpenInference(OpenInference):
    """The open inference API of a replica: models are loaded first, and not changed by calls."""

    def __init__(self, ensure: Ensure, *parts: Any) -> None:
        super().__init__(*parts)
        self._ensure = ensure

    async def ModelMetadata(
        self, request: oip.ModelMetadataRequest, deadline: float | None
    ) -> oip.ModelMetadataResponse:
        await self._ensure(request.name)
        return await super().ModelMetadata(request, deadline)

    async def ModelConfig(self, request: oip.ModelConfigRequest, deadline: float | None) -> oip.ModelConfigResponse:
        await self._ensure(request.name)
        return await super().ModelConfig(request, deadline)

    async def ModelInfer(self, request: oip.ModelInferRequest, deadline: float | None) -> oip.ModelInferResponse:
        await self._ensure(request.model_name)
        return await super().ModelInfer(request, deadline)

    async def replies(self, request: oip.ModelInferRequest, deadline: float | None) -> AsyncGenerator[Reply]:
        await self._ensure(request.model_name)
        async with aclosing(super().replies(request, deadline)) as replies:
            async for reply in replies:
                yield reply

    async def RepositoryModelLoad(
        self, request: oip.RepositoryModelLoadRequest, deadline: float | None
    ) -> oip.RepositoryModelLoadResponse:
        raise Unimplemented(_SHARED)

    async def RepositoryModelUnload(
        self, request: oip.RepositoryModelUnloadRequest, deadline: float | None
    ) -> oip.RepositoryModelUnloadResponse:
        raise Unimplemented(_SHARED)
