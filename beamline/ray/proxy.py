"""What runs inside Ray's proxies: gRPC methods as raw bytes, which Ray routes to a replica.

Ray puts behaviours of its own in the place of those that are registered here. Around them go three things that it does
not carry: the client's deadline, which goes to the replica as metadata; the status of a failed call with its metadata,
which a replica sends as an answer; and calls whose replica died, which are sent to another one. Every call may be sent
twice, because it has no effect but its answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from beamline.ray.methods import ANSWERED, handlers
from beamline.serving.api.http.endpoints import TIMEOUT

_ATTEMPTS = 3
_LOST = "the replica that ran this call ended; try again"
_NO_CODE = 0  # gRPC's own, of a call whose status was not set
_MODEL_ID = "multiplexed_model_id"  # by this metadata Ray finds a replica that has the model

ModelOf = Callable[[bytes], str]
Behaviour = Callable[[Any, Any], Any]


def services(servicer: object, server: Any) -> None:
    """Adds all services to a proxy's server. `servicer` is Ray's, and does nothing."""
    _add(server, by_model=False)


def services_by_model(servicer: object, server: Any) -> None:
    """The same, for replicas that load models as they are asked for (`models_per_replica`): a call goes to a replica
    that has its model already, where there is one."""
    _add(server, by_model=True)


def _add(server: Any, by_model: bool) -> None:
    by_service: dict[str, dict[str, Any]] = {}
    models: dict[str, ModelOf] = {}
    for path, handler in handlers().items():
        if by_model:
            models[path] = _model_reader(handler)
        raw = handler._replace(request_deserializer=None, response_serializer=None)
        by_service.setdefault(path.split("/")[1], {})[path] = raw
    for name, of_service in by_service.items():
        server.add_generic_rpc_handlers((RoutedService(name, of_service, models),))


class RoutedService(grpc.ServiceRpcHandler):  # type: ignore[misc, unused-ignore]
    """A service whose behaviours Ray has replaced, in `_method_handlers`; they are wrapped as a call comes."""

    def __init__(self, name: str, method_handlers: dict[str, Any], models: dict[str, ModelOf]) -> None:
        self._name = name
        self._method_handlers = method_handlers
        self._models = models

    def service_name(self) -> str:
        return self._name

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        handler = self._method_handlers.get(path)
        if handler is None:
            return None
        model_of = self._models.get(path)
        return handler._replace(
            unary_unary=_unary(handler.unary_unary, model_of),
            unary_stream=_stream(handler.unary_stream, model_of),
            stream_stream=_streams(handler.stream_stream),
        )


def _unary(behaviour: Behaviour, model_of: ModelOf | None) -> Behaviour:
    async def routed(request: bytes, context: Any) -> Any:
        model = None if model_of is None else model_of(request)
        for _ in range(_ATTEMPTS):
            carried = CarriedContext(context, model)
            response = await behaviour(request, carried)
            if not carried.lost:
                break
        carried.settle()
        return response

    return routed


def _stream(behaviour: Behaviour, model_of: ModelOf | None) -> Behaviour:
    async def routed(request: bytes, context: Any) -> AsyncIterator[Any]:
        model = None if model_of is None else model_of(request)
        for _ in range(_ATTEMPTS):
            carried = CarriedContext(context, model)
            begun = False
            async with aclosing(_answers(behaviour(request, carried), carried)) as messages:
                async for message in messages:
                    begun = True
                    yield message
            if begun or not carried.lost:
                break
        carried.settle()

    return routed


def _streams(behaviour: Behaviour) -> Behaviour:
    """Requests that were read can't be read again: it is not repeated."""

    async def routed(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        carried = CarriedContext(context, None)
        async with aclosing(_answers(behaviour(requests, carried), carried)) as messages:
            async for message in messages:
                yield message
        carried.settle()

    return routed


async def _answers(messages: AsyncGenerator[Any], carried: CarriedContext) -> AsyncGenerator[Any]:
    """Without the last message of a failed call, which brought its status and nothing else."""
    async with aclosing(messages):
        async for message in messages:
            if not carried.code():
                yield message


class CarriedContext:
    """A call's context, as one attempt sees it: with the deadline and the model as metadata, and a status that becomes
    the call's own only by `settle`."""

    def __init__(self, context: Any, model: str | None) -> None:
        self._context = context
        self._code: Any = _NO_CODE
        self._details = ""
        self._trailing: tuple[Any, ...] = ()
        self._metadata = [(key, value) for key, value in context.invocation_metadata() or () if key != TIMEOUT]
        remaining = context.time_remaining()
        if remaining is not None:
            self._metadata.append((TIMEOUT, str(max(1, int(1000 * remaining)))))
        if model:
            self._metadata.append((_MODEL_ID, model))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return self._metadata

    def code(self) -> Any:
        return self._code

    def set_code(self, code: Any) -> None:
        self._code = code

    def details(self) -> str:
        return self._details

    def set_details(self, details: str) -> None:
        self._details = details

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._trailing

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._trailing = tuple(trailing)

    @property
    def lost(self) -> bool:
        """Ray failed, and no replica has answered."""
        return self._code is grpc.StatusCode.INTERNAL and all(key != ANSWERED for key, _ in self._trailing)

    def settle(self) -> None:
        lost = self.lost
        self._context.set_code(grpc.StatusCode.UNAVAILABLE if lost else self._code)
        self._context.set_details(_LOST if lost else self._details)
        self._context.set_trailing_metadata(tuple(each for each in self._trailing if each[0] != ANSWERED))


def _model_reader(handler: Any) -> ModelOf:
    """What reads the model's name from a request; empty where it names none."""
    decode = handler.request_deserializer

    def read(request: bytes) -> str:
        try:
            message = decode(request)
        except DecodeError:  # the replica says so
            return ""
        return str(getattr(message, "model", "") or getattr(message, "model_name", ""))

    return read
