"""A running server's repository, from outside: load and unload."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import grpc

from beamline._channel import Connection
from beamline._failures import failure_of
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.errors import BeamlineError

_SERVICE = "/inference.GRPCInferenceService"


class AdminClient:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel = connection.channel()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

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
            return call(request, metadata=self._connection.metadata())
        except grpc.RpcError as error:
            raise failure_of(error, self._connection, None) from error
