"""Classify and Embed through a real channel, against PyTorch; and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx2 as httpx
import numpy as np
import pytest
import torch

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from beamline.serving.cli import main
from beamline.serving.commands import classify, embed
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from beamline.serving.text.tokenizer import TextTokenizer
from tests.serving.doubles import connected, started
from tests.support.pooled import LABELS, pooled_config, pooled_model

TEXTS = ["The file was found.", "No", "A longer text about nothing in particular."]


@asynccontextmanager
async def served(repository: Path) -> AsyncIterator[tuple[Server, InferenceStub]]:
    config = ServeConfig(repository=repository, grpc_port=0, metrics_port=0, threads=1)
    async with started(Server(config)) as server, connected(server) as stub:
        yield server, stub


def expected(repository: Path, text: str) -> dict[str, np.ndarray]:
    tokenizer = TextTokenizer.load(repository / "mood" / "1" / "tokenizer.json")
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        found = pooled_model(pooled_config()).outputs(ids, torch.ones_like(ids, dtype=torch.bool))
    return {name: tensor[0].numpy() for name, tensor in found.items()}


async def test_labels_are_pytorchs(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (server, stub):
        request = pb.ClassifyRequest(inputs=[pb.Input(text=text) for text in TEXTS])
        response = await stub.Classify(request)
        best = await stub.Classify(pb.ClassifyRequest(model="mood", inputs=request.inputs, top_k=1))
    assert (response.model, response.version) == ("mood", "1")
    for text, found, top in zip(TEXTS, response.classifications, best.classifications, strict=True):
        wanted = expected(pooled_repository, text)["probabilities"]
        assert [label.index for label in found.labels] == np.argsort(-wanted).tolist()
        assert [label.name for label in found.labels] == [LABELS[label.index] for label in found.labels]
        np.testing.assert_allclose([label.probability for label in found.labels], -np.sort(-wanted), atol=1e-5)
        assert list(top.labels) == list(found.labels)[:1]
        assert found.source_tokens > 1
    text = server.metrics.exposition().decode()
    assert 'beamline_requests_total{model="mood",outcome="ok"} 6.0' in text


@pytest.mark.parametrize("pooling", ["last", "mean", "max", "attention"])
@pytest.mark.parametrize("normalize", [False, True])
async def test_vectors_are_pytorchs(pooled_repository: Path, pooling: str, normalize: bool) -> None:
    async with served(pooled_repository) as (_, stub):
        response = await stub.Embed(
            pb.EmbedRequest(
                inputs=[pb.Input(text=text) for text in TEXTS],
                pooling=f"POOLING_{pooling.upper()}",
                normalize=normalize,
            )
        )
    for text, found in zip(TEXTS, response.embeddings, strict=True):
        wanted = expected(pooled_repository, text)[f"vector_{pooling}"]
        if normalize:
            wanted = wanted / np.linalg.norm(wanted)
        np.testing.assert_allclose(found.values, wanted, atol=1e-5)


async def test_neighbours_change_nothing(pooled_repository: Path) -> None:
    """Many calls at once, of all lengths: each answer is the one that it gets alone."""
    texts = [f"{'word ' * (number % 6)}number {number}." for number in range(48)]
    async with served(pooled_repository) as (_, stub):
        alone = [await stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text=text)])) for text in texts]
        calls = [stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text=text)])) for text in texts]
        together = await asyncio.gather(*calls)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.embeddings[0].values, other.embeddings[0].values, atol=1e-6)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (pb.ClassifyRequest(), "inputs is empty"),
        (pb.ClassifyRequest(inputs=[pb.Input(text=" ")]), r"inputs\[0\].text is empty"),
        (pb.ClassifyRequest(inputs=[pb.Input()]), r"inputs\[0\] is empty: give text or token_ids"),
        (pb.ClassifyRequest(inputs=[pb.Input(text="a")], top_k=4), "top_k is 4; this model has 3 labels: 1 to 3"),
        (pb.ClassifyRequest(inputs=[pb.Input(text="a " * 200)]), "reads at most 64: send less, or set truncate"),
        (
            pb.ClassifyRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[9999]))]),
            "contains 9999; this model's vocabulary has ids",
        ),
        (
            pb.ClassifyRequest(inputs=[pb.Input(features=pb.Features(rows=1))]),
            "has features, but model mood reads text",
        ),
        (pb.EmbedRequest(inputs=[pb.Input(text="a")], pooling=9), "pooling is 9; model mood knows"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_refused(
    pooled_repository: Path, request_: pb.ClassifyRequest | pb.EmbedRequest, sentence: str
) -> None:
    async with served(pooled_repository) as (_, stub):
        method = stub.Classify if isinstance(request_, pb.ClassifyRequest) else stub.Embed
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
            await method(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_long_texts_can_be_cut(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (_, stub):
        response = await stub.Classify(pb.ClassifyRequest(inputs=[pb.Input(text="a " * 200)], truncate=True))
    assert response.classifications[0].source_tokens == 64


async def test_a_model_that_does_not_write(pooled_repository: Path) -> None:
    async with served(pooled_repository) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="writes no text: it classifies or embeds") as caught:
            await stub.Translate(pb.TranslateRequest(model="mood", inputs=[pb.Input(text="a")]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="no model here translates; there is"):
            await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]))
        with pytest.raises(grpc.aio.AioRpcError, match="there is no model 'x' here; there is mood") as caught:
            await stub.Embed(pb.EmbedRequest(model="x", inputs=[pb.Input(text="a")]))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_same_over_http(pooled_repository: Path) -> None:
    config = ServeConfig(repository=pooled_repository, grpc_port=0, metrics_port=0, http_port=0, threads=1)
    async with (
        started(Server(config)) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        (listed,) = (await client.get("/v1/models")).json()["models"]
        labels = await client.post("/v1/classify", json={"inputs": [{"text": TEXTS[0]}], "top_k": 1})
        vector = await client.post("/v1/embed", json={"inputs": [{"text": TEXTS[0]}], "pooling": "POOLING_MAX"})
    assert listed == {"name": "mood", "version": "1", "task": "classify", "labels": list(LABELS)}
    wanted = expected(pooled_repository, TEXTS[0])
    best = int(wanted["probabilities"].argmax())
    (label,) = labels.json()["classifications"][0]["labels"]
    assert (label["name"], label.get("index", 0)) == (LABELS[best], best)
    np.testing.assert_allclose(vector.json()["embeddings"][0]["values"], wanted["vector_max"], atol=1e-5)


async def test_the_commands(pooled_repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(pooled_repository) as (server, _):
        target = ["--target", server.grpc_address]
        commands = {"classify": lambda: classify, "embed": lambda: embed}
        assert await asyncio.to_thread(main, ["classify", *target, "--top", "2", *TEXTS[:2]], commands) == 0
        labels = capsys.readouterr().out.splitlines()
        line = ["embed", *target, "--pooling", "mean", "--normalize", TEXTS[0]]
        assert await asyncio.to_thread(main, line, commands) == 0
        vector = json.loads(capsys.readouterr().out)
    for text, line_ in zip(TEXTS, labels, strict=False):
        wanted = expected(pooled_repository, text)["probabilities"]
        order = np.argsort(-wanted)[:2]
        assert line_ == "\t".join(f"{LABELS[index]} {wanted[index]:.4f}" for index in order)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
