"""The protocol's JSON and binary tensors, to messages and back: every mistake has a sentence."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.http.open_inference import messages
from beamline.serving.api.open_inference.tensors import OutputWriter, read_inputs
from beamline.serving.errors import InvalidRequest

TEXT = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["Größe", "b"]}
IDS = {"name": "token_ids", "shape": [2, 2], "datatype": "INT64"}


def read(value: Any, tail: bytes | None = None) -> messages.InferCall:
    head = value if isinstance(value, bytes) else json.dumps(value).encode()
    return messages.read_infer(head + (tail or b""), None if tail is None else len(head), "de", "3")


def binary(tensor: dict[str, Any], size: object) -> dict[str, Any]:
    return {**tensor, "parameters": {"binary_data_size": size}}


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def test_a_request_in_json() -> None:
    parameters = {"beam_size": 2, "length_penalty": 0.5, "early_stopping": True, "target_language": "de", "seed": 2**63}
    outputs = [{"name": "score", "parameters": {"binary_data": True}}, {"name": "text"}]
    given = {"id": "7", "parameters": parameters, "inputs": [TEXT], "outputs": outputs, "model_name": "another"}
    call = read(given)
    message = call.message
    assert (message.model_name, message.model_version, message.id) == ("de", "3", "7")
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in message.parameters.items()}
    kinds = ("int64_param", "double_param", "bool_param", "string_param", "uint64_param")
    assert chosen == dict(zip(parameters, kinds, strict=True))
    assert {name: getattr(message.parameters[name], kind) for name, kind in chosen.items()} == parameters
    (tensor,) = read_inputs(message)
    assert tensor.bytes_values == ("Größe".encode(), b"b")
    assert [output.name for output in message.outputs] == ["score", "text"]
    assert not any(output.parameters for output in message.outputs)
    assert [call.is_binary(name) for name in ("score", "text")] == [True, False]


@pytest.mark.parametrize("data", [[1, 2, 3, -1], [[1, 2], [3, -1]]])
@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_numbers_are_nested_or_flat(data: list[Any], datatype: str) -> None:
    (tensor,) = read_inputs(read({"inputs": [{**IDS, "datatype": datatype, "data": data}]}).message)
    assert (tensor.int_values, tensor.shape) == ((1, 2, 3, -1), (2, 2))


def test_tensors_behind_the_json_are_the_same() -> None:
    tail = packed("Größe", "b")
    call = read(
        {"inputs": [binary(TEXT | {"data": None}, len(tail))], "parameters": {"binary_data_output": True}}, tail
    )
    assert read_inputs(call.message) == read_inputs(read({"inputs": [TEXT]}).message)
    assert not call.message.parameters
    assert call.is_binary("text")
    ids = np.array([[1, 2], [3, -1]], "<i8").tobytes()
    (tensor,) = read_inputs(read({"inputs": [binary(IDS, 32)]}, ids).message)
    assert tensor.int_values == (1, 2, 3, -1)


ONE = {"name": "text", "shape": [1], "datatype": "BYTES"}
WRONG: list[tuple[Any, bytes | None, str]] = [
    (b"", None, "the body is not JSON"),
    (b"{", None, "the body is not JSON"),
    (b"\xff\xff", None, "says where it ends"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'{"inputs": NaN}', None, "NaN is no number"),
    ([], None, "it must be an object"),
    ({}, None, "the request has no `inputs`"),
    ({"input": []}, None, "the request has 'input'; known are id, parameters, inputs"),
    ({"inputs": {}}, None, "`inputs` is {}; it must be a list"),
    ({"inputs": [3]}, None, "inputs[0] is 3; it must be an object"),
    ({"inputs": [{}]}, None, "the name of inputs[0] is missing"),
    ({"inputs": [{"name": "text"}]}, None, "the datatype of input 'text' is missing"),
    ({"inputs": [{**ONE, "shape": "1"}]}, None, "the shape of input 'text' is"),
    ({"inputs": [{**ONE, "shape": [True]}]}, None, "must be a list of whole numbers"),
    ({"inputs": [{**ONE, "shape": [2**63]}]}, None, "must be a list of whole numbers"),
    ({"inputs": [{**ONE, "shape": [2**62] * 50_000}]}, None, "has 50000 axes; at most 4 are allowed"),
    ({"inputs": [{**ONE, "shape": [-1]}]}, None, "sizes must be 0 or more"),
    ({"inputs": [ONE]}, None, "input 'text' has no data"),
    ({"inputs": [{**ONE, "data": "a"}]}, None, "the data of input 'text' is"),
    ({"inputs": [{**ONE, "data": [3]}]}, None, "element 0 of input 'text' is 3; it must be text"),
    ({"inputs": [{**ONE, "data": ["\ud800"]}]}, None, "half of a surrogate pair"),
    ({"inputs": [{**ONE, "data": ["a"]}], "id": "\ud800"}, None, "half of a surrogate pair"),
    ({"inputs": [{**IDS, "data": [1, 2.5, 3, 4]}]}, None, "element 1 of input 'token_ids' is 2.5; INT64 is a whole"),
    ({"inputs": [{**IDS, "datatype": "INT32", "data": [2**31, 2, 3, 4]}]}, None, "from -2147483648 to 2147483647"),
    ({"inputs": [{**IDS, "data": [[1, 2, 3], [4]]}]}, None, "not nested as its shape [2, 2] says"),
    ({"inputs": [{**IDS, "data": [[1, 2], 3]}]}, None, "not nested as its shape [2, 2] says"),
    ({"inputs": [{**IDS, "data": [[[1], 2], [3, 4]]}]}, None, "not nested as its shape [2, 2] says"),
    ({"inputs": [TEXT], "id": 7}, None, "`id` is 7; it must be text"),
    ({"inputs": [TEXT], "parameters": []}, None, "`parameters` of the request is []"),
    ({"inputs": [TEXT], "parameters": {"beam_size": [2]}}, None, "parameter 'beam_size' is [2]; it must be text"),
    ({"inputs": [TEXT], "parameters": {"seed": 2**64}}, None, "parameter 'seed' is"),
    ({"inputs": [TEXT], "parameters": {"binary_data_output": 1}}, None, "it must be true or false"),
    ({"inputs": [TEXT], "outputs": [{}]}, None, "the name of outputs[0] is missing"),
    ({"inputs": [TEXT], "outputs": [{"name": "text", "parameters": {"binary_data": 1}}]}, None, "true or false"),
    ({"inputs": [binary(TEXT, 4)]}, b"    ", "data beside binary_data_size"),
    ({"inputs": [binary(ONE, -1)]}, b"", "binary_data_size -1; it must be a whole number"),
    ({"inputs": [binary(ONE, 6)]}, packed("a"), "has binary_data_size 6, but 5 bytes are left for it"),
    ({"inputs": [binary(ONE, 5)]}, None, "but 0 bytes are left for it behind the JSON"),
    ({"inputs": [binary(ONE, 5)]}, packed("a") + b"x", "stand 1 bytes more"),
    ({"inputs": [binary(ONE, 4)]}, packed("a")[:4], "ends in the middle of an element"),
    ({"inputs": [binary(IDS, 7)]}, b"1234567", "no whole number of INT64 elements"),
]


@pytest.mark.parametrize(("body", "tail", "sentence"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_said(body: Any, tail: bytes | None, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_inputs(read(body, tail).message)
    assert sentence in str(refused.value)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
TENSORS = st.fixed_dictionaries(
    {"name": st.just("text") | ANY, "shape": st.lists(st.integers(-1, 4), max_size=5) | ANY},
    optional={"datatype": st.sampled_from(["BYTES", "INT64", "FP32"]) | ANY, "data": ANY, "parameters": ANY},
)


@given(st.fixed_dictionaries({"inputs": st.lists(TENSORS, max_size=2) | ANY}, optional={"outputs": ANY, "id": ANY}))
@settings(max_examples=30, deadline=None)
def test_whatever_comes_is_read_or_refused(body: Any) -> None:
    with suppress(InvalidRequest):
        read_inputs(read(body).message)


def test_a_length_beyond_the_body_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is 100, but the body has 2 bytes"):
        messages.read_infer(b"{}", 100, "de", "")


def answer() -> oip.ModelInferResponse:
    response = oip.ModelInferResponse(model_name="de", model_version="3", id="7")
    writer = OutputWriter(response, raw=False)
    writer.text("text", [1, 2], ["Größe", "b"])
    writer.floats("score", [1, 2], [-0.5, -1.25])
    writer.integers("token_ids", [1, 2, 1], [5, -1])
    return response


def test_each_output_is_written_as_it_was_asked_for() -> None:
    head, tail = messages.write_infer(answer(), messages.InferCall(oip.ModelInferRequest()))
    assert tail is None
    found = json.loads(head)
    assert {name: found[name] for name in ("model_name", "model_version", "id")} == {
        "model_name": "de",
        "model_version": "3",
        "id": "7",
    }
    assert [(each["name"], each["datatype"], each["shape"], each["data"]) for each in found["outputs"]] == [
        ("text", "BYTES", [1, 2], ["Größe", "b"]),
        ("score", "FP32", [1, 2], [-0.5, -1.25]),
        ("token_ids", "INT64", [1, 2, 1], [5, -1]),
    ]
    mixed = messages.InferCall(oip.ModelInferRequest(), {"score": False}, otherwise=True)
    head, tail = messages.write_infer(answer(), mixed)
    assert tail == packed("Größe", "b") + np.array([5, -1], "<i8").tobytes()
    sizes = [each.get("parameters", {}).get("binary_data_size") for each in json.loads(head)["outputs"]]
    assert sizes == [len(packed("Größe", "b")), None, 16]


def test_descriptions_are_what_protobuf_reads_back() -> None:
    config = oip.ModelConfig(name="de", max_batch_size=0)
    config.version_policy.specific.versions.extend([1, 2])
    config.input.add(name="text", data_type=oip.TYPE_STRING, dims=[-1], optional=True)
    config.parameters["slots"].string_value = "16"
    found = messages.plain(config)
    assert json_format.ParseDict(found, oip.ModelConfig()) == config
    assert (found["max_batch_size"], found["input"][0]["dims"]) == (0, [-1])
    assert "model_transaction_policy" not in found


def test_the_parameters_of_a_load() -> None:
    request = oip.RepositoryModelLoadRequest()
    messages.read_change(b'{"parameters": {"config": "{}"}}', request)
    assert request.parameters["config"].string_param == "{}"
    messages.read_change(b"", request)
    with pytest.raises(InvalidRequest, match="must be text"):
        messages.read_change(b'{"parameters": {"config": 0.5}}', request)
    with pytest.raises(InvalidRequest, match="known are ready"):
        messages.read_index(b'{"all": true}')
    assert messages.read_index(b'{"ready": true}').ready
