"""What a user of Triton does, with tritonclient as it comes from PyPI. As a program it knows nothing of ours:

    python triton_session.py ADDRESS MODEL

It prints "done" when everything was answered as it should be.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def texts(*values: str) -> list[Any]:
    tensor = triton.InferInput("text", [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_))
    return [tensor]


def words(result: Any) -> list[list[str]]:
    return [[value.decode() for value in row] for row in result.as_numpy("text")]


def refusal(action: Any) -> tuple[str, str]:
    try:
        action()
    except InferenceServerException as error:
        return str(error.status()), str(error.message())
    raise AssertionError("it was not refused")


def session(address: str, model: str, versions: tuple[str, ...] = ("1",)) -> None:
    """`model` echoes, and its repository has these versions, of which the newest is served."""
    client = triton.InferenceServerClient(address)
    _server(client, model)
    _description(client, model, versions[-1])
    _infer(client, model, versions[-1])
    _async(client, model)
    _stream(client, model)
    _statistics(client, model, versions[-1])
    client.close()


def _server(client: Any, model: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert not client.is_model_ready("unknown")
    metadata = client.get_server_metadata()
    assert metadata.name == "beamline"
    assert "model_repository" in metadata.extensions


def _description(client: Any, model: str, version: str) -> None:
    metadata = client.get_model_metadata(model)
    assert (metadata.name, list(metadata.versions)) == (model, [version])
    assert [(tensor.name, tensor.datatype) for tensor in metadata.inputs] == [("text", "BYTES"), ("token_ids", "INT64")]
    assert [tensor.name for tensor in metadata.outputs] == ["text", "score", "token_ids"]
    config = client.get_model_config(model, as_json=True)["config"]
    assert (config["name"], config["backend"]) == (model, "beamline")
    assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": ["-1"], "optional": True}
    assert int(config["parameters"]["max_beam_size"]["string_value"]) >= 1
    assert refusal(lambda: client.get_model_config("unknown"))[0] == "StatusCode.NOT_FOUND"


def _infer(client: Any, model: str, version: str) -> None:
    result = client.infer(model, texts("hello", "world hello"), request_id="42", parameters={"beam_size": 2})
    assert words(result) == [["hello"], ["world hello"]]
    assert result.as_numpy("score").dtype == np.float32
    assert result.as_numpy("score").shape == (2, 1)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("42", model, version)
    outputs = [triton.InferRequestedOutput("token_ids")]
    found = client.infer(model, texts("hello"), outputs=outputs).as_numpy("token_ids")
    assert found.dtype == np.int64
    tensor = triton.InferInput("token_ids", [1, found.shape[2]], "INT64")
    tensor.set_data_from_numpy(found[0])
    assert words(client.infer(model, [tensor])) == [["hello"]]
    status, sentence = refusal(lambda: client.infer(model, texts("hello"), parameters={"beams": 2}))
    assert (status, sentence.startswith("parameter 'beams' is not known")) == ("StatusCode.INVALID_ARGUMENT", True)
    assert refusal(lambda: client.infer("unknown", texts("hello")))[0] == "StatusCode.NOT_FOUND"


def _async(client: Any, model: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for number in range(8):
        client.async_infer(
            model,
            texts("hello " * (number % 3) + "world"),
            callback=lambda result, error, number=number: answers.put((number, result, error)),
        )
    found = [answers.get(timeout=60) for _ in range(8)]
    assert all(error is None for _, _, error in found)
    assert {number: words(result) for number, result, _ in found} == {
        number: [["hello " * (number % 3) + "world"]] for number in range(8)
    }


def _stream(client: Any, model: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    try:
        _talk(client, model, answers)
    finally:
        client.stop_stream()  # or its thread would keep a failed test from ending


def _talk(client: Any, model: str, answers: queue.Queue[Any]) -> None:
    # In order, each in one piece.
    for number in range(4):
        client.async_stream_infer(model, texts("hello"), request_id=str(number))
    for number in range(4):
        result, error = answers.get(timeout=60)
        assert error is None
        response = result.get_response()
        assert (response.id, words(result)) == (str(number), [["hello"]])
        assert response.parameters["triton_final_response"].bool_param
    # As it comes, in pieces of two texts, and an empty response at the end.
    client.async_stream_infer(
        model,
        texts("hello", "world"),
        request_id="s",
        enable_empty_final_response=True,
        parameters={"stream": True},
    )
    said = {0: "", 1: ""}
    while True:
        piece, error = answers.get(timeout=60)
        assert error is None
        response = piece.get_response()
        if response.parameters["triton_final_response"].bool_param:
            break
        said[response.parameters["index"].int64_param] += words(piece)[0][0]
    assert (said, list(response.outputs)) == ({0: "hello", 1: "world"}, [])
    # An error is a response, and the stream goes on.
    client.async_stream_infer(model, texts("hello"), parameters={"beam_size": 10_000})
    client.async_stream_infer(model, texts("world"))
    result, error = answers.get(timeout=60)
    assert result is None
    assert "beam_size is 10000" in str(error)
    assert words(answers.get(timeout=60)[0]) == [["world"]]


def _statistics(client: Any, model: str, version: str) -> None:
    (stats,) = client.get_inference_statistics(model).model_stats
    assert (stats.name, stats.version) == (model, version)
    assert stats.inference_count == stats.inference_stats.success.count >= 15  # the last ones may still be on their way
    assert stats.execution_count == sum(batch.compute_infer.count for batch in stats.batch_stats) > 0
    found = stats.inference_stats
    parts = (found.compute_input, found.queue, found.compute_infer, found.compute_output)
    assert all(part.count > 0 and part.ns > 0 for part in parts)
    assert abs(found.success.ns - sum(part.ns for part in parts)) <= len(parts)  # each is rounded
    assert stats.last_inference > 0


def generation(address: str, model: str) -> None:
    """`model` continues a prompt with the prompt."""
    client = triton.InferenceServerClient(address)
    answers: queue.Queue[Any] = queue.Queue()
    try:
        result = client.infer(model, texts("abc", "de"), parameters={"max_tokens": 16, "stop": "~"})
        assert words(result) == [["abc"], ["de"]]
        assert (result.as_numpy("score") < 0).all()
        sampling = {"n": 2, "temperature": 0.7, "seed": 3, "logit_bias": "7:-1,8:2"}
        two = client.infer(model, texts("abc"), parameters=sampling)
        assert words(two) == [["abc", "abc"]]
        refused = refusal(lambda: client.infer(model, texts("abc"), parameters={"num_hypotheses": 2}))
        assert refused[0] == "StatusCode.INVALID_ARGUMENT"
        assert "known are max_tokens" in refused[1]
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, texts("abcdef"), parameters={"stream": True, "max_tokens": 16})
        said, final = "", False
        while not final:
            piece, error = answers.get(timeout=60)
            assert error is None, error
            said += words(piece)[0][0]
            final = piece.get_response().parameters["triton_final_response"].bool_param
        assert said == "abcdef"
        client.async_stream_infer(model, texts("a", "b"), parameters={"stream": True})
        assert "takes one prompt" in str(answers.get(timeout=60)[1])
    finally:
        client.stop_stream()
        client.close()


def repository(address: str, model: str) -> None:
    """The repository has versions 1 and 2 of the model, of which 2 is served, and a model `broken`."""
    client = triton.InferenceServerClient(address)

    def states() -> dict[tuple[str, str], str]:
        return {(line.name, line.version): line.state for line in client.get_model_repository_index().models}

    def answering() -> str:
        return str(client.infer(model, texts("hello")).get_response().model_version)

    assert states() == {(model, "2"): "READY", ("broken", "1"): "UNAVAILABLE"}
    assert answering() == "2"
    reasons = {line.name: line.reason for line in client.get_model_repository_index().models}
    assert "weights.bin" in reasons["broken"]
    assert refusal(lambda: client.infer("broken", texts("hello")))[0] == "StatusCode.UNAVAILABLE"
    assert refusal(lambda: client.load_model("broken"))[0] == "StatusCode.UNAVAILABLE"
    # Both at once, then the older one alone.
    policy = {"version_policy": {"specific": {"versions": [1, 2]}}}
    client.load_model(model, config=json.dumps(policy))
    assert client.is_model_ready(model, "1")
    assert client.is_model_ready(model, "2")
    assert client.infer(model, texts("hello"), model_version="1").get_response().model_version == "1"
    assert len(client.get_inference_statistics(model).model_stats) == 2
    client.load_model(model, config=json.dumps({"version_policy": {"specific": {"versions": [1]}}}))
    assert answering() == "1"
    assert not client.is_model_ready(model, "2")
    client.unload_model(model)
    assert not client.is_model_ready(model)
    assert refusal(lambda: client.infer(model, texts("hello")))[0] == "StatusCode.UNAVAILABLE"
    client.load_model(model)
    assert answering() == "2"
    assert refusal(lambda: client.load_model("unknown"))[0] == "StatusCode.NOT_FOUND"
    assert refusal(lambda: client.unload_model("unknown"))[0] == "StatusCode.NOT_FOUND"
    wrong = {"max_batch_size": 4}
    assert refusal(lambda: client.load_model(model, config=json.dumps(wrong)))[0] == "StatusCode.INVALID_ARGUMENT"
    files = {"file:1/model.onnx": b"x"}
    assert refusal(lambda: client.load_model(model, config="{}", files=files))[0] == "StatusCode.INVALID_ARGUMENT"
    assert refusal(lambda: client.load_model(model, config="{"))[0] == "StatusCode.INVALID_ARGUMENT"
    assert refusal(lambda: client.get_trace_settings())[0] == "StatusCode.UNIMPLEMENTED"
    client.close()


if __name__ == "__main__":
    session(sys.argv[1], sys.argv[2])
    ours = [name for name in sys.modules if name.partition(".")[0] in ("serving", "protos", "loadtest")]
    assert not ours, ours
    print("done")
