"""The reference that we are measured against gives everybody their own answer, in batches."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from tests.benchmarks.peers.ctranslate2_server import Batcher, Translation


class Reversing:
    """In place of CTranslate2. The first batch waits until it may go."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.may_go = threading.Event()

    def translate_batch(self, sources, beam_size, **options):
        assert self.may_go.wait(60)
        self.batches.append((len(sources), beam_size))
        if ["bad", "</s>"] in sources:
            raise ValueError("bad")
        return [SimpleNamespace(hypotheses=[source[-2::-1]]) for source in sources]


class Words:
    """In place of sentencepiece."""

    def encode(self, text, out_type):
        return text.split()

    def decode(self, pieces):
        return " ".join(pieces)


async def test_everybody_gets_their_own_answer():
    translator = Reversing()
    batcher = Batcher(translator, max_batch=8, max_wait=0.0, max_length=20)
    running = asyncio.ensure_future(batcher.run())
    server = grpc.aio.server()
    add_InferenceServicer_to_server(Translation(batcher, Words(), beam=4), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InferenceStub(channel)

        async def ask(text: str, beam_size: int | None = None):
            request = pb.TranslateRequest(inputs=[pb.Input(text=text)], options=pb.DecodingOptions(beam_size=beam_size))
            return (await stub.Translate(request)).translations[0]

        calls = [asyncio.ensure_future(ask(f"a {number}", beam_size=1 + number % 2)) for number in range(20)]
        translator.may_go.set()
        answers = await asyncio.gather(*calls)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask("bad")
        assert (await ask("still there")).hypotheses[0].text == "there still"
    await server.stop(None)
    running.cancel()
    assert [answer.hypotheses[0].text for answer in answers] == [f"{number} a" for number in range(20)]
    assert {(answer.source_tokens, answer.target_tokens) for answer in answers} == {(3, 3)}
    assert sum(count for count, _ in translator.batches) == 22
    assert max(count for count, _ in translator.batches) <= 8
    assert {beam for _, beam in translator.batches} == {1, 2, 4}
