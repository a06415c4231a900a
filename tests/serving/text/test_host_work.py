"""Work for large texts: how much may be here, and where it is done."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from functools import partial

import grpc
import httpx2 as httpx
import pytest
from google.protobuf.json_format import ParseDict

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.api.http import gateway
from beamline.serving.api.http.json_messages import to_dict, to_json
from beamline.serving.errors import Overloaded
from beamline.serving.server import Server
from beamline.serving.text.host_work import TextWorkers, is_large
from tests.serving.doubles import WAIT_SECONDS, EngineDouble, connected, eventually, running

KIB, MIB = 2**10, 2**20
LARGE_REPLY = {
    "inputs": [{"text": "a" * 60}] * 500,
    "options": {"num_hypotheses": 8, "beam_size": 8, "return_tokens": True},
}


def test_so_many_bytes_may_be_here() -> None:
    workers = TextWorkers(max_bytes=100 * KIB)
    with workers.admitted(60 * KIB), workers.admitted(40 * KIB):
        with pytest.raises(Overloaded, match="--max-pending-mib") as refused, workers.admitted(3 * KIB):
            pass
        assert refused.value.retry_after is not None
        with workers.admitted(2 * KIB):  # a small one always has its place
            pass
    with workers.admitted(900 * KIB):  # one that comes alone, too
        pass
    with workers.admitted(100 * KIB):  # nothing is left of the others
        pass


async def test_small_work_does_not_wait_behind_large_work() -> None:
    workers, may_end = TextWorkers(), threading.Event()
    large = [asyncio.create_task(workers.run(MIB, partial(may_end.wait, WAIT_SECONDS))) for _ in range(3)]
    assert await workers.run(10 * KIB, lambda: threading.current_thread().name) == "text_0"
    assert await workers.run(KIB, threading.current_thread) is threading.current_thread()
    assert not any(task.done() for task in large)
    may_end.set()
    await asyncio.gather(*large)


async def test_what_is_too_much_is_refused_once_before_it_is_read() -> None:
    engine = EngineDouble(held=True)
    large = pb.TranslateRequest(inputs=[pb.Input(text="a" * 60)] * 1000)
    size = large.ByteSize()
    async with running(engine, max_pending_bytes=3 * size) as server, connected(server) as stub:
        waiting = [stub.Translate(large) for _ in range(3)]  # they are sent at once
        await eventually(lambda: engine.waiting == 3 * 64)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Translate(large)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert engine.waiting == 3 * 64
        counted = server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "overloaded"})
        assert counted == 1
        engine.release()
        small = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]))
        assert small.model == "fake"
        for call in waiting:
            await call


async def test_a_large_body_is_refused_while_it_comes() -> None:
    async with running(EngineDouble(), http_port=0, max_pending_bytes=MIB) as server:
        server.service.workers.reserve(MIB)  # as others would
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=WAIT_SECONDS) as client:
            answer = await client.post("/v1/translate", json={"inputs": [{"text": "a" * 200_000}]})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            small = await client.post("/v1/translate", json={"inputs": [{"text": "a"}]})
            assert small.status_code == 200
        assert server.service.workers._bytes == MIB


# -- replies -----------------------------------------------------------------------------------------------------------


async def test_a_large_reply_is_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(reply: pb.TranslateResponse) -> str:
        threads.append(threading.current_thread().name)
        return to_json(reply)

    monkeypatch.setattr(gateway, "to_json", watched)
    async with (
        running(EngineDouble(), http_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=WAIT_SECONDS) as client,
    ):
        large = await client.post("/v1/translate", json=LARGE_REPLY)
        assert len(large.json()["translations"]) == 500
        assert (await client.post("/v1/translate", json={"inputs": [{"text": "a"}]})).status_code == 200
    assert threads == ["large-text_0", threading.current_thread().name]


def test_what_is_large() -> None:
    assert not is_large(pb.TranslateResponse(model="a", translations=[pb.Translation()] * 100))
    assert is_large(pb.TranslateResponse(translations=[pb.Translation()] * 1000))
    assert is_large(pb.EmbedResponse(embeddings=[pb.Embedding(values=[0.5] * 1000)]))
    assert is_large(pb.GenerateResponse(generations=[pb.Generation(text="a" * 100_000)]))
    assert not is_large(pb.GenerateReply(text="a" * 1000))


@pytest.mark.parametrize(
    "message",
    [
        pb.TranslateResponse(),
        pb.TranslateResponse(
            model="ä",
            translations=[pb.Translation(hypotheses=[pb.Hypothesis(text='"', score=float("-inf"))], source_tokens=3)],
        ),
        pb.EmbedResponse(version="1", embeddings=[pb.Embedding(values=[0.1, 2.0])]),
        pb.GenerateReply(index=2, text="a\n", usage=pb.Usage(prompt_tokens=1)),
        pb.ScoreResponse(model="m", scores=[pb.ScoredText(perplexity=1.5)]),
    ],
)
def test_written_item_by_item_it_is_the_same(message: pb.TranslateResponse) -> None:
    assert json.loads(to_json(message)) == to_dict(message)


@pytest.mark.full
@pytest.mark.parametrize("over", ["http", "grpc"])
async def test_large_replies_do_not_stall_the_event_loop(over: str) -> None:
    """Promised are 20 ms of work in a row; an answer of 8 MB as JSON took 1.4 seconds."""
    turns: list[float] = []

    async def watch() -> None:
        """What the loop's thread computes between two turns. Not the time on a clock, which other processes take."""
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            turns.append(time.thread_time() - began)

    body = {**LARGE_REPLY, "inputs": LARGE_REPLY["inputs"] * 2}  # type: ignore[operator]

    def ask(server: Server) -> int:
        """In a thread, so that the loop's work is the server's alone."""
        if over == "http":
            url = f"http://{server.http_address}/v1/translate"
            return len(httpx.post(url, json=body, timeout=WAIT_SECONDS).content)
        with grpc.insecure_channel(server.grpc_address) as channel:
            request = ParseDict(body, pb.TranslateRequest())
            return int(beamline_pb2_grpc.InferenceStub(channel).Translate(request, timeout=WAIT_SECONDS).ByteSize())

    async with running(EngineDouble(), http_port=0) as server:
        gc.freeze()  # as `beamline serve` does; of this process, which has torch, it would take longest
        watching = asyncio.create_task(watch())
        sizes = [await asyncio.to_thread(ask, server) for _ in range(3)]
        watching.cancel()
        gc.unfreeze()
    assert min(sizes) > (8_000_000 if over == "http" else 1_000_000)
    print(f"over {over}: {max(turns) * 1000:.1f} ms at most")
    assert max(turns) < 0.2
