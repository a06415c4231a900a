"""Callers without retries of their own, each again as soon as it is answered."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import Counter

import grpc

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.ray.inside.cluster import GRPC, HTTP

TEXT = "abcdefghij"
STREAMED = 10 * TEXT  # longer, so that most of its time pieces are on their way
PATIENCE = 120.0


class Callers:
    """Counts what became of the calls, by their kind: unary, stream, http."""

    def __init__(self, unary: int = 8, streams: int = 0, http_calls: int = 0, sequences: int = 1) -> None:
        """`sequences`: in each unary call."""
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0  # seconds, of a unary call
        self._sequences = sequences
        self._over = threading.Event()
        self._threads = [threading.Thread(target=asyncio.run, args=[self._grpc(unary, streams)])]
        self._threads += [threading.Thread(target=self._http) for _ in range(http_calls)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        print(dict(self.outcomes), f"slowest unary call {self.slowest:.2f} s")

    def failed(self, kind: str) -> list[str]:
        return [each for each in self.outcomes if each.startswith(kind) and not each.endswith(" OK")]

    async def _grpc(self, unary: int, streams: int) -> None:
        async with grpc.aio.insecure_channel(GRPC) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            calls = [self._again("unary", lambda: self._unary(stub)) for _ in range(unary)]
            calls += [self._again("stream", lambda: self._stream(stub)) for _ in range(streams)]
            await asyncio.gather(*calls)

    async def _again(self, kind: str, call) -> None:
        while not self._over.is_set():
            try:
                self.outcomes[f"{kind} {'OK' if await call() in (TEXT, STREAMED) else 'wrong'}"] += 1
            except grpc.aio.AioRpcError as error:
                self.outcomes[f"{kind} {error.code().name}: {error.details()}"] += 1

    async def _unary(self, stub: beamline_pb2_grpc.InferenceStub) -> str:
        began = time.monotonic()
        inputs = [pb.Input(text=TEXT)] * self._sequences
        reply = await stub.Translate(pb.TranslateRequest(inputs=inputs), timeout=PATIENCE)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return str(reply.translations[-1].hypotheses[0].text)

    async def _stream(self, stub: beamline_pb2_grpc.InferenceStub) -> str:
        request = pb.TranslateRequest(inputs=[pb.Input(text=STREAMED)])
        return "".join([reply.text async for reply in stub.TranslateStream(request, timeout=PATIENCE)])

    def _http(self) -> None:
        connection = http.client.HTTPConnection(HTTP, timeout=PATIENCE)
        body = json.dumps({"inputs": [{"text": TEXT}]})
        while not self._over.is_set():
            try:
                connection.request("POST", "/v1/translate", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                content = answer.read().decode()
                right = answer.status == 200 and TEXT in content
                self.outcomes["http OK" if right else f"http {answer.status} {content[:60]}"] += 1
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.outcomes[f"http {error!r}"] += 1
        connection.close()
