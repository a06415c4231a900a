"""The methods of the open inference protocol, as gRPC and HTTP both call them, over the same models as `beamline.v1`.

A method takes a protobuf message and a deadline on `time.monotonic()`, and has the name that it has in
open_inference.proto.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference import describe, execution, repository
from beamline.serving.api.open_inference.messages import ParsedRequest
from beamline.serving.api.open_inference.streaming import Reply
from beamline.serving.contract.call import current_call, enter
from beamline.serving.errors import ModelNotFound, ModelUnavailable, ShuttingDown
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.models.manager import ModelManager
from beamline.serving.models.registry import Model, Models
from beamline.serving.text.host_work import TextWorkers
from beamline.version import beamline_version

SERVICE = "inference.GRPCInferenceService"  # its public name


class OpenInference:
    def __init__(
        self, models: Models, manager: Callable[[], ModelManager], lifecycle: Lifecycle, workers: TextWorkers
    ) -> None:
        """`manager` raises `ShuttingDown` while there is none: HTTP answers before the models are loaded."""
        self._models = models
        self._manager = manager
        self._lifecycle = lifecycle
        self.workers = workers

    # -- the server ----------------------------------------------------------------------------------------------

    async def ServerLive(self, request: oip.ServerLiveRequest, deadline: float | None) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, deadline: float | None) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._lifecycle.ready)

    async def ServerMetadata(
        self, request: oip.ServerMetadataRequest, deadline: float | None
    ) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="beamline", version=beamline_version(), extensions=describe.EXTENSIONS)

    # -- models --------------------------------------------------------------------------------------------------

    async def ModelReady(self, request: oip.ModelReadyRequest, deadline: float | None) -> oip.ModelReadyResponse:
        try:
            self.check_ready(request)
        except (ModelNotFound, ModelUnavailable, ShuttingDown):
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=True)

    def check_ready(self, request: oip.ModelReadyRequest) -> None:
        """Raises why the model is not ready."""
        self._models.find(request.name, request.version)
        if not self._lifecycle.ready:
            raise ShuttingDown(f"this server is {self._lifecycle.describe}; try another one")

    async def ModelMetadata(
        self, request: oip.ModelMetadataRequest, deadline: float | None
    ) -> oip.ModelMetadataResponse:
        model = self._manager().served(self._models.find(request.name, request.version))
        return describe.metadata(model, self._versions(model.manifest.name))

    async def ModelConfig(self, request: oip.ModelConfigRequest, deadline: float | None) -> oip.ModelConfigResponse:
        model = self._manager().served(self._models.find(request.name, request.version))
        return oip.ModelConfigResponse(config=describe.config(model, self._versions(model.manifest.name)))

    async def ModelStatistics(
        self, request: oip.ModelStatisticsRequest, deadline: float | None
    ) -> oip.ModelStatisticsResponse:
        if request.name and request.version:
            found = [self._models.find(request.name, request.version)]
        elif request.name:
            found = self._models.versions(request.name)
        else:
            found = self._models.everything()
        manager = self._manager()
        return oip.ModelStatisticsResponse(model_stats=[describe.statistics(manager.served(each)) for each in found])

    def _versions(self, name: str) -> list[int]:
        return [model.card.version for model in self._models.versions(name)]

    # -- inference -----------------------------------------------------------------------------------------------

    @contextmanager
    def _use(self, request: oip.ModelInferRequest) -> Iterator[Model]:
        with (
            self._lifecycle.call(),
            self.workers.admitted(request.ByteSize()),
            self._models.use_any(request.model_name, request.model_version) as model,
        ):
            yield model

    async def ModelInfer(self, request: oip.ModelInferRequest, deadline: float | None) -> oip.ModelInferResponse:
        with self._use(request) as model:
            parsed = await execution.parse(request, model)
            _enter(parsed)
            return await execution.infer(model, parsed, request.ByteSize(), deadline)

    async def replies(self, request: oip.ModelInferRequest, deadline: float | None) -> AsyncGenerator[Reply]:
        """To one request of a ModelStreamInfer. Leave it through `contextlib.aclosing`."""
        with self._use(request) as model:
            parsed = await execution.parse(request, model)
            _enter(parsed)
            if not parsed.parameters.stream:
                response = await execution.infer(model, parsed, request.ByteSize(), deadline)
                yield Reply(response, last=True, in_order=True)
                return
            async with aclosing(execution.stream(model, parsed, deadline)) as responses:
                async for response, last in responses:
                    yield Reply(response, last, in_order=False, empty_final=parsed.parameters.empty_final)

    # -- the repository ------------------------------------------------------------------------------------------

    async def RepositoryIndex(
        self, request: oip.RepositoryIndexRequest, deadline: float | None
    ) -> oip.RepositoryIndexResponse:
        return repository.index(self._manager().index(), request.ready)

    async def RepositoryModelLoad(
        self, request: oip.RepositoryModelLoadRequest, deadline: float | None
    ) -> oip.RepositoryModelLoadResponse:
        await self._manager().load(request.model_name, repository.requested_versions(request))
        return oip.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: oip.RepositoryModelUnloadRequest, deadline: float | None
    ) -> oip.RepositoryModelUnloadResponse:
        # Triton's parameter `unload_dependents` has no effect: no model depends on another.
        await self._manager().unload(request.model_name)
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
