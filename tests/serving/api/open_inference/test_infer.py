"""Requests and answers, message by message: both kinds of contents, every option, every mistake."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.parameters import option_names
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, ids, running

SERVICE = "/inference.GRPCInferenceService"


def raw_texts(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def text_request(*texts: str, raw: bool = False, **parameters: Any) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(id="7")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    if raw:
        request.raw_input_contents.append(raw_texts(*texts))
    else:
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def id_request(rows: list[list[int]], datatype: str = "INT64", raw: bool = False) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest()
    tensor = request.inputs.add(name="token_ids", datatype=datatype, shape=[len(rows), len(rows[0])])
    flat = [value for row in rows for value in row]
    if raw:
        code = {"INT64": "q", "INT32": "i", "UINT32": "I"}[datatype]
        request.raw_input_contents.append(struct.pack(f"<{len(flat)}{code}", *flat))
    elif datatype == "INT64":
        tensor.contents.int64_contents.extend(flat)
    elif datatype == "INT32":
        tensor.contents.int_contents.extend(flat)
    else:
        tensor.contents.uint_contents.extend(flat)
    return request


async def infer(server: Server, request: oip.ModelInferRequest) -> oip.ModelInferResponse:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            f"{SERVICE}/ModelInfer",
            request_serializer=oip.ModelInferRequest.SerializeToString,
            response_deserializer=oip.ModelInferResponse.FromString,
        )
        response: oip.ModelInferResponse = await call(request, timeout=60)
        return response


async def asked(**parameters: Any) -> tuple[Any, Any]:
    """What reaches the engine."""
    engine = EngineDouble()
    async with running(engine) as server:
        await infer(server, text_request("a", **parameters))
    return engine.submitted[0].options, engine.submitted[0]


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
async def test_texts_in_texts_and_scores_out(raw: bool) -> None:
    async with running(EngineDouble()) as server:
        response = await infer(server, text_request("Größe 😀", "b", raw=raw, num_hypotheses=2))
    assert (response.model_name, response.model_version, response.id) == ("fake", "1", "7")
    text, score = response.outputs
    assert (text.name, text.datatype, list(text.shape)) == ("text", "BYTES", [2, 2])
    assert (score.name, score.datatype, list(score.shape)) == ("score", "FP32", [2, 2])
    if raw:
        assert response.raw_output_contents[0] == raw_texts("Größe 😀", "Größe 😀", "b", "b")
        assert struct.unpack("<4f", response.raw_output_contents[1]) == (-1, -2, -1, -2)
    else:
        assert [value.decode() for value in text.contents.bytes_contents] == ["Größe 😀", "Größe 😀", "b", "b"]
        assert list(score.contents.fp32_contents) == [-1, -2, -1, -2]
        assert not response.raw_output_contents


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32"])
async def test_token_ids_in_and_out(raw: bool, datatype: str) -> None:
    rows = [[5, 6, 2], [7, 2, -1]] if datatype != "UINT32" else [[5, 6, 2], [7, 8, 2]]
    request = id_request(rows, datatype, raw)
    request.outputs.add(name="token_ids")
    engine = EngineDouble()
    async with running(engine) as server:
        response = await infer(server, request)
    assert [list(each.source) for each in engine.submitted] == [[i for i in row if i >= 0] for row in rows]
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("token_ids", "INT64", [2, 1, 3])
    flat = [value for row in rows for value in row]
    found = struct.unpack("<6q", response.raw_output_contents[0]) if raw else output.contents.int64_contents
    assert list(found) == flat


async def test_a_single_row_of_ids_and_a_column_of_texts() -> None:
    engine = EngineDouble()
    single = id_request([[5, 2]])
    single.inputs[0].shape[:] = [2]
    column = text_request("a", "b")
    column.inputs[0].shape[:] = [2, 1]
    async with running(engine) as server:
        assert list((await infer(server, single)).outputs[0].shape) == [1, 1]
        assert list((await infer(server, column)).outputs[0].shape) == [2, 1]
    assert [each.source for each in engine.submitted] == [(5, 2), ids("a"), ids("b")]


# -- options ---------------------------------------------------------------------------------------------------------


async def test_options_are_parameters_with_the_names_of_our_own() -> None:
    options, request = await asked(
        beam_size=3,
        num_hypotheses=2,
        length_penalty=2,
        repetition_penalty=1.5,
        early_stopping="never",
        min_length=4,
        max_length=20,
        no_repeat_ngram_size=2,
        target_prefix="x",
        suppress_tokens="7, 8",
        time_limit_ms=500,
        split_sentences=True,
        timeout=60_000_000,
        priority=4,
    )
    assert (options.beam_size, options.num_hypotheses, options.length_penalty) == (3, 2, 2.0)
    assert (options.repetition_penalty, options.early_stopping) == (1.5, "never")
    assert (options.min_length, options.max_length, options.no_repeat_ngram_size) == (4, 20, 2)
    assert (options.prefix, options.suppress_tokens) == (ids("x")[:-1], (7, 8))
    assert 0.4 < options.time_limit <= 0.5
    assert request.priority == 3
    assert request.queue_deadline is not None


async def test_early_stopping_is_a_bool_too() -> None:
    options, request = await asked(early_stopping=True)
    assert options.early_stopping is True
    assert (request.priority, request.queue_deadline) == (1, None)


def test_every_option_of_ours_is_known_here() -> None:
    """A new option must get a place: as a parameter, or as an output."""
    elsewhere = {"return_scores", "return_tokens", "return_alignment"}
    assert set(pb.DecodingOptions.DESCRIPTOR.fields_by_name) == {*option_names(pb.DecodingOptions()), *elsewhere}
    elsewhere = {"return_log_probs", "return_tokens", "top_log_probs"}
    assert set(pb.GenerationOptions.DESCRIPTOR.fields_by_name) == {*option_names(pb.GenerationOptions()), *elsewhere}


# -- mistakes --------------------------------------------------------------------------------------------------------


def broken(**changes: Any) -> oip.ModelInferRequest:
    request = text_request("a")
    for name, value in changes.items():
        if name == "shape":
            request.inputs[0].shape[:] = value
        else:
            setattr(request.inputs[0], name, value)
    return request


def with_raw(*contents: bytes, contents_too: bool = False) -> oip.ModelInferRequest:
    request = text_request("a")
    if not contents_too:
        request.inputs[0].ClearField("contents")
    request.raw_input_contents.extend(contents)
    return request


def with_output(name: str, **parameters: bool) -> oip.ModelInferRequest:
    request = text_request("a")
    output = request.outputs.add(name=name)
    for key, value in parameters.items():
        output.parameters[key].bool_param = value
    return request


def twice() -> oip.ModelInferRequest:
    request = text_request("a")
    request.inputs.append(request.inputs[0])
    return request


def many_inputs() -> oip.ModelInferRequest:
    return oip.ModelInferRequest(inputs=[oip.ModelInferRequest.InferInputTensor(name=str(n)) for n in range(9)])


def many_outputs() -> oip.ModelInferRequest:
    request = text_request("a")
    for _ in range(4):
        request.outputs.add(name="text")
    return request


def no_value() -> oip.ModelInferRequest:
    request = text_request("a")
    request.parameters["beam_size"].SetInParent()
    return request


MISTAKES: list[tuple[oip.ModelInferRequest, str]] = [
    (oip.ModelInferRequest(), "must have one input, 'text' or 'token_ids'; it has none"),
    (broken(name="words"), "it has words"),
    (twice(), "two inputs with one name"),
    (broken(datatype="FP32"), "datatype 'FP32'; it must be BYTES"),
    (broken(datatype="INT64"), "has 0 INT64 elements, but shape [1] needs 1"),
    (broken(shape=[2]), "has 1 BYTES elements, but shape [2] needs 2"),
    (broken(shape=[-1]), "sizes must be 0 or more"),
    (broken(shape=[1, 1, 1]), "it must be [N] or [N, 1]"),
    (broken(shape=[2**62, 2**62]), "elements; at most 65536 are allowed"),
    (broken(shape=[1] * 100_000), "has 100000 axes; at most 4 are allowed"),
    (broken(shape=[0, 2**62]), "has 1 BYTES elements, but shape"),
    (many_inputs(), "has 9 inputs; at most 8 are allowed"),
    (many_outputs(), "4 outputs are asked for"),
    (with_raw(b"\0\0\0\0" * 1000), "has 2 BYTES elements, but shape [1] needs 1"),
    (text_request(), "inputs is empty"),
    (text_request(" "), "inputs[0].text is empty"),
    (text_request("x" * 100), "tokens; this model reads at most 64"),
    (with_raw(b"\1\0\0\0a", b""), "1 inputs and 2 raw_input_contents"),
    (with_raw(b"\1\0\0\0a", contents_too=True), "contents beside raw_input_contents"),
    (with_raw(b"\1\0\0"), "ends in the middle of a length"),
    (with_raw(b"\5\0\0\0a"), "ends in the middle of an element"),
    (with_raw(b"\1\0\0\0\xff"), "is not UTF-8"),
    (id_request([[-5, 2]]), "contains -5; ids are 0 or more"),
    (id_request([[-1, 2]]), "behind the padding (-1) stands another id"),
    (id_request([[300, 2]]), "contains 300; this model's source vocabulary has ids 0 to 258"),
    (id_request([[-1, -1]]), "has no ids"),
    (with_output("logits"), "there is no output 'logits'; there is text, score, token_ids"),
    (with_output("text", binary_data=True), "knows none for outputs"),
    (no_value(), "parameter 'beam_size' has no value"),
    (text_request("a", beams=4), "parameter 'beams' is not known; known are beam_size"),
    (text_request("a", beam_size=99), "beam_size is 99; this model allows 1 to 8"),
    (text_request("a", beam_size=-1), "parameter 'beam_size' is -1; it must be 0 to"),
    (text_request("a", beam_size=True), "parameter 'beam_size' must be a whole number"),
    (text_request("a", beam_size=2.5), "parameter 'beam_size' must be a whole number"),
    (text_request("a", length_penalty="1"), "parameter 'length_penalty' must be a number"),
    (text_request("a", early_stopping="soon"), "must be true, false, or the string 'never'"),
    (text_request("a", suppress_tokens="1,x"), "must be a string of ids"),
    (text_request("a", suppress_tokens="1" * 5000), "must be a string of ids with commas between them, each 0 to"),
    (text_request("a", suppress_tokens="4294967296"), "each 0 to 4294967295"),
    (text_request("a", return_scores=True), "ask for the output 'score' instead"),
    (text_request("a", return_alignment=True), "parameter 'return_alignment' is not known"),
    (text_request("a", sequence_id=3), "keep no state between requests"),
    (text_request("a", timeout=-1), "'timeout' is -1"),
    (text_request("a", priority=9), "'priority' is 9; it must be 1 to 4, or 0"),
    (text_request("a", target_language="de"), "has no choice of languages"),
]


async def test_mistakes_are_told_in_a_sentence() -> None:
    async with running(EngineDouble()) as server:
        for request, sentence in MISTAKES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(server, request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, sentence
            assert sentence in (caught.value.details() or "")


async def test_shared_memory_is_refused() -> None:
    request = text_request("a")
    request.inputs[0].parameters["shared_memory_region"].string_param = "/dev/shm/x"
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError, match="lies in shared memory"):
            await infer(server, request)


async def test_unknown_models_are_not_found() -> None:
    async with running(EngineDouble()) as server:
        for name, version in (("nope", ""), ("fake", "2")):
            request = text_request("a")
            request.model_name, request.model_version = name, version
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(server, request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["text", "token_ids"])
async def test_too_many_rows_are_refused_before_anything_is_made_for_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(pb, "Input", lambda **fields: made.append(fields))
    request = text_request(*["a"] * 1025) if name == "text" else id_request([[5]] * 2**19, "INT32", raw=True)
    rows = request.inputs[0].shape[0]
    async with running(EngineDouble()) as server:
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"the call has {rows} inputs; at most 1024 are allowed"
        ) as caught:
            await infer(server, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not made
