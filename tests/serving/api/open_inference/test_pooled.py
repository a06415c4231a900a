"""Models that classify or embed, by the open inference API: tritonclient gets what `beamline.v1` returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from tests.serving.api.open_inference.triton_session import refusal, texts
from tests.serving.doubles import connected, started
from tests.support.pooled import LABELS

TEXTS = ["The file was found.", "No", "A longer text about nothing in particular."]
INPUTS = [pb.Input(text=text) for text in TEXTS]


@asynccontextmanager
async def served(repository: Path) -> AsyncIterator[tuple[InferenceStub, Any, Callable[..., Any]]]:
    """A stub of `beamline.v1`, Triton's client, and how to call that one, which blocks."""
    config = ServeConfig(repository=repository, grpc_port=0, metrics_port=0, threads=1)
    async with started(Server(config)) as server, connected(server) as stub:
        client = triton.InferenceServerClient(server.grpc_address)
        try:
            yield stub, client, asyncio.to_thread
        finally:
            await asyncio.to_thread(client.close)


def wanted(*names: str) -> list[Any]:
    return [triton.InferRequestedOutput(name) for name in names]


async def test_labels_and_vectors_are_those_of_the_first_door(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (stub, client, ask):
        labels = await stub.Classify(pb.ClassifyRequest(inputs=INPUTS))
        vectors = await stub.Embed(pb.EmbedRequest(inputs=INPUTS, pooling=pb.POOLING_MEAN, normalize=True))
        both = ("label", "probability", "embedding")
        options = {"pooling": "mean", "normalize": True}
        everything = await ask(client.infer, "mood", texts(*TEXTS), outputs=wanted(*both), parameters=options)
        plain = await ask(client.infer, "mood", texts(*TEXTS))
        best = await ask(client.infer, "mood", texts(*TEXTS), parameters={"top_k": 1})
        ids = triton.InferInput("token_ids", [1, 3], "INT64").set_data_from_numpy(np.array([[5, 6, -1]]))
        by_ids = await ask(client.infer, "mood", [ids], outputs=wanted("embedding"))
        again = await stub.Embed(pb.EmbedRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[5, 6]))]))
    found = [[(label.name, label.probability) for label in each.labels] for each in labels.classifications]
    names, probabilities = plain.as_numpy("label"), plain.as_numpy("probability")
    assert names.shape == probabilities.shape == (len(TEXTS), len(LABELS))
    assert [[name.decode() for name in row] for row in names] == [[name for name, _ in row] for row in found]
    np.testing.assert_allclose(probabilities, [[value for _, value in row] for row in found], atol=1e-6)
    assert plain.as_numpy("embedding") is None
    np.testing.assert_array_equal(best.as_numpy("label"), names[:, :1])
    np.testing.assert_array_equal(everything.as_numpy("label"), names)
    expected = np.array([each.values for each in vectors.embeddings], np.float32)
    np.testing.assert_allclose(everything.as_numpy("embedding"), expected, atol=1e-6)
    np.testing.assert_allclose(by_ids.as_numpy("embedding")[0], again.embeddings[0].values, atol=1e-6)


async def test_they_are_described_and_counted(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (_, client, ask):
        metadata = await ask(client.get_model_metadata, "mood")
        config = (await ask(client.get_model_config, "mood", as_json=True))["config"]
        answer = await ask(client.infer, "mood", texts(*TEXTS), outputs=wanted("embedding"))

        def counted() -> Any:
            while (stats := client.get_inference_statistics("mood").model_stats[0]).inference_count < len(TEXTS):
                time.sleep(0.01)  # an answer may be there a moment before it is counted
            return stats

        stats = await ask(counted)
    assert [(tensor.name, tensor.datatype) for tensor in metadata.inputs] == [("text", "BYTES"), ("token_ids", "INT64")]
    width = answer.as_numpy("embedding").shape[1]
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in metadata.outputs] == [
        ("label", "BYTES", [-1, -1]),
        ("probability", "FP32", [-1, -1]),
        ("embedding", "FP32", [-1, width]),
    ]
    assert [output["name"] for output in config["output"]] == ["label", "probability", "embedding"]
    assert config["parameters"]["task"]["string_value"] == "classify"
    assert all(label in config["parameters"]["labels"]["string_value"] for label in LABELS)
    assert stats.execution_count == sum(batch.compute_infer.count for batch in stats.batch_stats) > 0
    assert stats.inference_count == stats.inference_stats.success.count == len(TEXTS)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"top_k": 9}, (), "top_k is 9; this model has 3 labels: 1 to 3"),
    ({"top_k": "2"}, (), "parameter 'top_k' must be a whole number"),
    ({"top_k": 1}, ("embedding",), "parameter 'top_k' chooses labels; ask for the output 'label'"),
    ({"pooling": "first"}, (), "pooling is first; model mood knows attention, last, mean, max"),
    ({"normalize": 1}, ("embedding",), "parameter 'normalize' must be true or false"),
    ({"beam_size": 2}, (), "'beam_size' is not known; known are top_k, pooling, normalize, truncate, timeout"),
    ({"stream": True}, (), "parameter 'stream' is not known"),
    ({}, ("text",), "there is no output 'text'; there is label, probability, embedding"),
]


async def test_what_is_refused(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (_, client, ask):
        for parameters, outputs, sentence in REFUSED:
            asked = partial(client.infer, "mood", texts("a"), parameters=parameters, outputs=wanted(*outputs) or None)
            status, said = await ask(refusal, asked)
            assert status == "StatusCode.INVALID_ARGUMENT", said
            assert sentence in said


async def test_a_stream_answers_in_one_piece(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (_, client, ask):

        def talk() -> list[Any]:
            answers: list[Any] = []
            client.start_stream(callback=lambda result, error: answers.append((result, error)))
            for text in TEXTS:
                client.async_stream_infer("mood", texts(text), priority=1, parameters={"truncate": True})
            client.stop_stream()  # waits for the answers
            return answers

        answers = await ask(talk)
    assert [error for _, error in answers] == [None] * len(TEXTS)
    assert all(result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers)
    assert all(result.as_numpy("label").shape == (1, len(LABELS)) for result, _ in answers)
