"""What a server's repository holds, and what of it is served."""

from __future__ import annotations

from beamline._calls.operation import Operation, Settings
from beamline._calls.requests import checked_timeout, rpc_of
from beamline.protos import open_inference_pb2 as oip
from beamline.types import Model

_SERVICE = "inference.GRPCInferenceService"  # as all who speak this protocol know it
_INDEX = rpc_of("RepositoryIndex", oip.RepositoryIndexRequest, oip.RepositoryIndexResponse, _SERVICE)


def models(timeout: float | None) -> Operation[list[Model]]:
    def answers(response: oip.RepositoryIndexResponse) -> list[list[Model]]:
        return [[Model(each.name, each.version, each.state, each.reason) for each in response.models]]

    if timeout is not None:
        timeout = checked_timeout(timeout)
    item = oip.RepositoryIndexRequest()
    return Operation(_INDEX, Settings(timeout), True, [item], lambda _: item, answers)
