"""The methods of `inference.GRPCInferenceService`, over the same models as `beamline.v1`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.grpc.inference_service import deadline_of
from beamline.serving.api.guard import Guard
from beamline.serving.api.open_inference import describe, execution, repository
from beamline.serving.api.open_inference.messages import ParsedRequest
from beamline.serving.api.open_inference.streaming import Reply, Stream
from beamline.serving.contract.call import current_call, enter
from beamline.serving.errors import ModelNotFound, ModelUnavailable
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.models.manager import ModelManager
from beamline.serving.models.registry import Model, Models
from beamline.serving.text.host_work import TextWorkers
from beamline.version import beamline_version

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class OpenInferenceServicer:
    def __init__(
        self, models: Models, manager: ModelManager, lifecycle: Lifecycle, guard: Guard, workers: TextWorkers
    ) -> None:
        self._models = models
        self._manager = manager
        self._lifecycle = lifecycle
        self._guard = guard
        self._workers = workers

    # -- the server ----------------------------------------------------------------------------------------------

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Any) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Any) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._lifecycle.ready)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Any) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="beamline", version=beamline_version(), extensions=describe.EXTENSIONS)

    # -- models --------------------------------------------------------------------------------------------------

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Any) -> oip.ModelReadyResponse:
        try:
            self._models.find(request.name, request.version)
        except (ModelNotFound, ModelUnavailable):
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=self._lifecycle.ready)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Any) -> oip.ModelMetadataResponse:
        model = self._manager.served(self._models.find(request.name, request.version))
        return describe.metadata(model, self._versions(model.manifest.name))

    async def ModelConfig(self, request: oip.ModelConfigRequest, context: Any) -> oip.ModelConfigResponse:
        model = self._manager.served(self._models.find(request.name, request.version))
        return oip.ModelConfigResponse(config=describe.config(model, self._versions(model.manifest.name)))

    async def ModelStatistics(self, request: oip.ModelStatisticsRequest, context: Any) -> oip.ModelStatisticsResponse:
        if request.name and request.version:
            found = [self._models.find(request.name, request.version)]
        elif request.name:
            found = self._models.versions(request.name)
        else:
            found = self._models.everything()
        return oip.ModelStatisticsResponse(
            model_stats=[describe.statistics(self._manager.served(each)) for each in found]
        )

    def _versions(self, name: str) -> list[int]:
        return [model.card.version for model in self._models.versions(name)]

    # -- inference -----------------------------------------------------------------------------------------------

    @contextmanager
    def _use(self, request: oip.ModelInferRequest) -> Iterator[Model]:
        with (
            self._lifecycle.call(),
            self._workers.admitted(request.ByteSize()),
            self._models.use_any(request.model_name, request.model_version) as model,
        ):
            yield model

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        with self._use(request) as model:
            parsed = await execution.parse(request, model)
            _enter(parsed)
            return await execution.infer(model, parsed, request.ByteSize(), deadline_of(context))

    async def ModelStreamInfer(self, requests: AsyncIterator[oip.ModelInferRequest], context: Any) -> None:
        await Stream(self._replies, self._error_message, context).run(requests)

    async def _replies(self, request: oip.ModelInferRequest, context: Any) -> AsyncGenerator[Reply]:
        with self._use(request) as model:
            parsed = await execution.parse(request, model)
            _enter(parsed)
            if not parsed.parameters.stream:
                response = await execution.infer(model, parsed, request.ByteSize(), deadline_of(context))
                yield Reply(response, last=True, in_order=True)
                return
            async with aclosing(execution.stream(model, parsed, deadline_of(context))) as responses:
                async for response, last in responses:
                    yield Reply(response, last, in_order=False, empty_final=parsed.parameters.empty_final)

    def _error_message(self, error: Exception) -> str:
        return self._guard.failure(error, STREAM_INFER, current_call().request_id).message

    # -- the repository ------------------------------------------------------------------------------------------

    async def RepositoryIndex(self, request: oip.RepositoryIndexRequest, context: Any) -> oip.RepositoryIndexResponse:
        return repository.index(self._manager.index(), request.ready)

    async def RepositoryModelLoad(
        self, request: oip.RepositoryModelLoadRequest, context: Any
    ) -> oip.RepositoryModelLoadResponse:
        await self._manager.load(request.model_name, repository.requested_versions(request))
        return oip.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: oip.RepositoryModelUnloadRequest, context: Any
    ) -> oip.RepositoryModelUnloadResponse:
        # Triton's parameter `unload_dependents` has no effect: no model depends on another.
        await self._manager.unload(request.model_name)
        return oip.RepositoryModelUnloadResponse()


def _enter(request: ParsedRequest) -> None:
    """A request's own priority and queue timeout take precedence over those of the call's headers."""
    parameters, call = request.parameters, current_call()
    enter(
        replace(
            call,
            priority=call.priority if parameters.priority is None else parameters.priority,
            queue_timeout=parameters.queue_timeout or call.queue_timeout,
        )
    )
