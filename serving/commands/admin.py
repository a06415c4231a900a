"""A running server's repository, from outside: list, load, unload."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import grpc

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.commands.call_errors import sentence_of
from beamline.serving.commands.client import CallFailed, Credentials
from beamline.serving.errors import BeamlineError

_SERVICE = "/inference.GRPCInferenceService"


class AdminClient:
    def __init__(self, target: str, credentials: Credentials) -> None:
        self._target = target
        self._tls = credentials.tls
        self._metadata = credentials.metadata()
        self._channel = credentials.channel(target, [])

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def index(self) -> list[oip.RepositoryIndexResponse.ModelIndex]:
        return list(self._call("RepositoryIndex", oip.RepositoryIndexRequest(), oip.RepositoryIndexResponse).models)

    def load(self, model: str) -> None:
        """NAME as its serving.toml says, or NAME/VERSION: this one alone. Returns when it is served."""
        name, slash, version = model.partition("/")
        request = oip.RepositoryModelLoadRequest(model_name=name)
        if slash:
            if not version.isdecimal():
                raise BeamlineError(f"{model!r} names no model to load: write NAME or NAME/VERSION")
            policy = {"version_policy": {"specific": {"versions": [int(version)]}}}
            request.parameters["config"].string_param = json.dumps(policy)
        self._call("RepositoryModelLoad", request, oip.RepositoryModelLoadResponse)

    def unload(self, model: str) -> None:
        request = oip.RepositoryModelUnloadRequest(model_name=model)
        self._call("RepositoryModelUnload", request, oip.RepositoryModelUnloadResponse)

    def _call(self, method: str, request: Any, response: Any) -> Any:
        call: Any = self._channel.unary_unary(
            f"{_SERVICE}/{method}", type(request).SerializeToString, response.FromString
        )
        try:
            return call(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise CallFailed(sentence_of(error, self._target, self._tls)) from error
