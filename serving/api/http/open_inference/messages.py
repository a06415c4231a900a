"""The protocol's JSON, and the tensors that may stand behind it, from and to the messages that gRPC has.

A message has typed contents always, however its tensors came; an output that is asked for as binary data is packed when
the response is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.tensors import INTEGERS, contents, element_count, pack, unpack
from beamline.serving.errors import InvalidRequest

HEADER_LENGTH = "inference-header-content-length"  # of the JSON, where tensors stand behind it

_MAX_NAME = 40  # characters of a name that the client made up
_MAX_UNKNOWN = 3  # fields that one error names
_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"
_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request, and which outputs it wants as binary data: by name, and else."""

    message: oip.ModelInferRequest
    binary: Mapping[str, bool] = field(default_factory=dict)
    otherwise: bool = False

    def is_binary(self, output: str) -> bool:
        return self.binary.get(output, self.otherwise)


def read_infer(body: bytes, header_length: int | None, name: str, version: str) -> InferCall:
    """`header_length`: of the JSON; None: all is JSON. Raises `InvalidRequest`."""
    if header_length is not None and header_length > len(body):
        raise InvalidRequest(f"{HEADER_LENGTH} is {header_length}, but the body has {len(body)} bytes")
    end = len(body) if header_length is None else header_length
    # The path says which model is meant: a body may be passed on from one to another.
    known = ("id", "parameters", "inputs", "outputs", "model_name", "model_version")
    with _whole_and_flat():
        given = _fields(read_json(body[:end]), "the request", known)
        return _infer_call(given, _Tail(body[end:]), name, version)


def _infer_call(given: dict[str, Any], tail: _Tail, name: str, version: str) -> InferCall:
    message = oip.ModelInferRequest(model_name=name, model_version=version)
    message.id = _typed(str, given.get("id", ""), "`id`", "text, in quotes")
    parameters = _parameters(given, "the request")
    otherwise = _typed(bool, parameters.pop(_ALL_BINARY, False), f"parameter {_ALL_BINARY!r}", "true or false")
    set_parameters(parameters, message.parameters)
    if "inputs" not in given:
        raise InvalidRequest("the request has no `inputs`: a list of objects with name, shape, datatype and data")
    for number, each in enumerate(_typed(list, given["inputs"], "`inputs`", "a list")):
        _read_input(each, f"inputs[{number}]", message.inputs.add(), tail)
    tail.check_empty()
    binary: dict[str, bool] = {}
    for number, each in enumerate(_typed(list, given.get("outputs", []), "`outputs`", "a list")):
        where = f"outputs[{number}]"
        wanted = _fields(each, where, ("name", "parameters"))
        output = message.outputs.add(name=_typed(str, wanted.get("name"), f"the name of {where}", "text, in quotes"))
        parameters = _parameters(wanted, where)
        if (chosen := parameters.pop(_BINARY, None)) is not None:
            binary[output.name] = _typed(bool, chosen, f"parameter {_BINARY!r} of {where}", "true or false")
        set_parameters(parameters, output.parameters)
    return InferCall(message, binary, otherwise)


class _Tail:
    """What stands behind the JSON: the tensors that are binary data, one behind the other."""

    def __init__(self, rest: bytes) -> None:
        self._rest = rest
        self._position = 0

    def take(self, where: str, size: int) -> bytes:
        left = len(self._rest) - self._position
        if size > left:
            raise InvalidRequest(
                f"{where} has {_SIZE} {size}, but {left} bytes are left for it behind the JSON, whose length is the "
                f"header {HEADER_LENGTH}"
            )
        self._position += size
        return self._rest[self._position - size : self._position]

    def check_empty(self) -> None:
        if left := len(self._rest) - self._position:
            raise InvalidRequest(
                f"behind the JSON and the tensors stand {left} bytes more; the inputs' {_SIZE} must add up to all"
            )


def _read_input(value: Any, where: str, tensor: oip.ModelInferRequest.InferInputTensor, tail: _Tail) -> None:
    given = _fields(value, where, ("name", "shape", "datatype", "parameters", "data"))
    tensor.name = _typed(str, given.get("name"), f"the name of {where}", "text, in quotes")
    where = f"input {tensor.name[:_MAX_NAME]!r}"
    tensor.datatype = _typed(str, given.get("datatype"), f"the datatype of {where}", "text, in quotes")
    shape = _typed(list, given.get("shape"), f"the shape of {where}", "a list of whole numbers")
    if not all(type(size) is int and size in _INT64 for size in shape):
        raise InvalidRequest(f"the shape of {where} must be a list of whole numbers")
    count = element_count(where, shape)
    tensor.shape.extend(shape)
    parameters = _parameters(given, where)
    size = parameters.pop(_SIZE, None)
    set_parameters(parameters, tensor.parameters)
    if size is None:
        if "shared_memory_region" not in parameters:  # refused when the tensor is read, as over gRPC
            _fill(tensor, where, _data(given, where, shape))
        return
    if "data" in given:
        raise InvalidRequest(f"{where} has data beside {_SIZE}; send one of the two")
    if type(size) is not int or size < 0:
        raise InvalidRequest(f"{where} has {_SIZE} {_shown(size)}; it must be a whole number, 0 or more")
    raw = tail.take(where, size)
    if tensor.datatype == "BYTES" or tensor.datatype in INTEGERS:
        contents(tensor).extend(unpack(where, tensor.datatype, raw, count))


def _data(given: dict[str, Any], where: str, shape: list[int]) -> list[Any]:
    """Its elements, which may come as a flat list, or nested as the shape is."""
    if "data" not in given:
        raise InvalidRequest(f"{where} has no data: give a list, or binary data with the parameter {_SIZE}")
    data: list[Any] = _typed(list, given["data"], f"the data of {where}", "a list")
    nested = any(isinstance(each, list) for each in data)
    return _flat(data, where, shape, shape) if nested else data


def _flat(data: Any, where: str, shape: list[int], left: list[int]) -> list[Any]:
    if not left and not isinstance(data, list):
        return [data]
    if not left or not isinstance(data, list) or len(data) != left[0]:
        raise InvalidRequest(
            f"the data of {where} is not nested as its shape {shape} says; nest it so, or send it flat"
        )
    return [value for each in data for value in _flat(each, where, shape, left[1:])]


def _fill(tensor: oip.ModelInferRequest.InferInputTensor, where: str, values: list[Any]) -> None:
    """Another datatype than these is refused when the tensor is read, as it is over gRPC."""
    if tensor.datatype == "BYTES":
        for index, value in enumerate(values):
            _typed(str, value, f"element {index} of {where}", "text, in quotes")
        contents(tensor).extend(value.encode() for value in values)
    elif tensor.datatype in INTEGERS:
        bounds = np.iinfo(INTEGERS[tensor.datatype])
        lowest, highest = int(bounds.min), int(bounds.max)
        for index, value in enumerate(values):
            if type(value) is not int or not lowest <= value <= highest:
                raise InvalidRequest(
                    f"element {index} of {where} is {_shown(value)}; {tensor.datatype} is a whole number from "
                    f"{lowest} to {highest}"
                )
        contents(tensor).extend(values)


def read_index(body: bytes) -> oip.RepositoryIndexRequest:
    with _whole_and_flat():
        ready = _optional(body, ("ready",)).get("ready", False)
        return oip.RepositoryIndexRequest(ready=_typed(bool, ready, "`ready`", "true or false"))


def read_change(body: bytes, message: oip.RepositoryModelLoadRequest | oip.RepositoryModelUnloadRequest) -> None:
    """The parameters of a load or unload."""
    with _whole_and_flat():
        set_parameters(_parameters(_optional(body, ("parameters",)), "the request"), message.parameters)


def _optional(body: bytes, known: tuple[str, ...]) -> dict[str, Any]:
    return _fields(read_json(body), "the request", known) if body.strip() else {}


# -- JSON ------------------------------------------------------------------------------------------------------------


@contextmanager
def _whole_and_flat() -> Iterator[None]:
    """Refuses what is JSON, but more than Python's reader or a message can hold."""
    try:
        yield
    except UnicodeEncodeError:
        raise InvalidRequest("the JSON has text with half of a surrogate pair; it must be whole characters") from None
    except RecursionError:
        raise InvalidRequest("the body is not JSON that is read here: it is nested too deeply") from None


def read_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"the body is not JSON in UTF-8; where tensors stand behind it, {HEADER_LENGTH} says where it ends"
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _fields(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Those that are given; null is as if it were left out."""
    given = _typed(dict, value, where, "an object, { ... }")
    unknown = [key for key in given if key not in known]
    if unknown:
        names = ", ".join(repr(key[:_MAX_NAME]) for key in unknown[:_MAX_UNKNOWN])
        raise InvalidRequest(f"{where} has {names}; known are {', '.join(known)}")
    return {key: each for key, each in given.items() if each is not None}


def _typed(kind: type, value: Any, where: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidRequest(f"{where} is {_shown(value)}; it must be {what}")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else json.dumps(value)[:_MAX_NAME]


def _parameters(given: dict[str, Any], where: str) -> dict[str, Any]:
    return dict(_typed(dict, given.get("parameters", {}), f"`parameters` of {where}", "an object, { ... }"))


def set_parameters(given: Mapping[str, Any], parameters: Any) -> None:
    """`parameters`: a map of a message, whose values are of the kinds that JSON has."""
    for name, value in given.items():
        kind = _kind(value)
        if kind not in type(parameters.GetEntryClass()().value).DESCRIPTOR.fields_by_name:
            raise InvalidRequest(
                f"parameter {name[:_MAX_NAME]!r} is {_shown(value)}; it must be text, a number, true or false"
            )
        setattr(parameters[name], kind, value)


def _kind(value: Any) -> str:
    """The field of a parameter that holds it; empty where there is none."""
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param" if value in _INT64 else "uint64_param" if value in _UINT64 else ""
    return "double_param" if isinstance(value, float) else "string_param" if isinstance(value, str) else ""


# -- responses -------------------------------------------------------------------------------------------------------


def write_infer(response: oip.ModelInferResponse, call: InferCall) -> tuple[bytes, bytes | None]:
    """The JSON, and what stands behind it; None where no output is binary data."""
    outputs: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for output in response.outputs:
        values = contents(output)
        written: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if call.is_binary(output.name):
            tail.append(pack(output.datatype, values))
            written["parameters"] = {_SIZE: len(tail[-1])}
        else:
            written["data"] = [each.decode() for each in values] if output.datatype == "BYTES" else list(values)
        outputs.append(written)
    head = {"model_name": response.model_name, "model_version": response.model_version}
    named = {**head, "id": response.id} if response.id else head
    return write_json({**named, "outputs": outputs}), b"".join(tail) if tail else None


def write_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def plain(message: Message) -> dict[str, Any]:
    """A description as Triton writes it: what is 0 or empty is there, and numbers are numbers, of which protobuf's own
    JSON makes text where they have 64 bits."""
    found: dict[str, Any] = {}
    for each in message.DESCRIPTOR.fields:
        value = getattr(message, each.name)
        kind = each.message_type
        if each.has_presence and not message.HasField(each.name):
            continue
        if kind is not None and kind.GetOptions().map_entry:
            found[each.name] = {key: plain(value[key]) for key in value}
        elif each.is_repeated:
            found[each.name] = [plain(item) for item in value] if kind is not None else list(value)
        elif each.enum_type is not None:
            found[each.name] = each.enum_type.values_by_number[value].name
        else:
            found[each.name] = value if kind is None else plain(value)
    return found
