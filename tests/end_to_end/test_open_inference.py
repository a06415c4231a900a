"""The open inference API of a real server returns what `beamline.v1` returns."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.support.processes import PATIENCE, ServerProcess

LINES = ["The quick brown fox jumps over the lazy dog.", "A value is an object.", "Grüße: 3 € für „Stück“…"]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    client = triton.InferenceServerClient(server.grpc)
    try:
        yield client
    finally:
        client.close()


def texts(*values: str) -> list[Any]:
    tensor = triton.InferInput("text", [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_))
    return [tensor]


def first_door(server: ServerProcess, **options: Any) -> list[list[pb.Hypothesis]]:
    with grpc.insecure_channel(server.grpc) as channel:
        request = pb.TranslateRequest(
            model="tiny",
            inputs=[pb.Input(text=line) for line in LINES],
            options=pb.DecodingOptions(return_scores=True, return_tokens=True, **options),
        )
        response = beamline_pb2_grpc.InferenceStub(channel).Translate(request, timeout=PATIENCE)
    return [list(translation.hypotheses) for translation in response.translations]


def test_texts_scores_and_tokens_are_the_same(server: ServerProcess, client: Any) -> None:
    options = {"beam_size": 4, "num_hypotheses": 3, "length_penalty": 0.5, "max_length": 40}
    expected = first_door(server, **options)
    outputs = [triton.InferRequestedOutput(name) for name in ("text", "score", "token_ids")]
    result = client.infer("tiny", texts(*LINES), parameters=options, outputs=outputs)
    assert result.as_numpy("text").tolist() == [[each.text.encode() for each in row] for row in expected]
    assert result.as_numpy("score") == pytest.approx(np.array([[each.score for each in row] for row in expected]))
    ids = [[[i for i in each if i >= 0] for each in row] for row in result.as_numpy("token_ids").tolist()]
    assert ids == [[[token.id for token in each.tokens] for each in row] for row in expected]


def test_a_stream_adds_up_to_the_same(server: ServerProcess, client: Any) -> None:
    expected = first_door(server, max_length=30)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer("tiny", texts(*LINES), parameters={"stream": True, "max_length": 30})
        said, scores, final = [""] * len(LINES), [np.nan] * len(LINES), False
        while not final:
            result, error = answers.get(timeout=PATIENCE)
            assert error is None, error
            parameters = result.get_response().parameters
            index, final = parameters["index"].int64_param, parameters["triton_final_response"].bool_param
            said[index] += result.as_numpy("text")[0, 0].decode()
            if (score := result.as_numpy("score")) is not None:
                scores[index] = score[0, 0]
    finally:
        client.stop_stream()
    assert said == [row[0].text for row in expected]
    assert scores == pytest.approx([row[0].score for row in expected])
