"""Many clients at once. As a program it is one more process full of them:

    python -m tests.end_to_end.crowd ADDRESS CLIENTS EACH SEED

It prints "ready" once all of its clients are connected, and reads the cases (JSON: a list of requests in base64) in
one line from standard input, which is also the sign to begin. Then it prints its answers in one line.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc


@dataclass(frozen=True)
class Answered:
    case: int
    response: pb.TranslateResponse


class Crowd:
    """Clients that are connected, several on each channel; every one asks its own cases, one after the other."""

    def __init__(self, address: str, clients: int, seed: int) -> None:
        self._address = address
        self._clients = clients
        self._random = random.Random(seed)
        self._stack = AsyncExitStack()
        self._stubs: list[beamline_pb2_grpc.InferenceStub] = []

    async def __aenter__(self) -> Crowd:
        for number in range(max(1, self._clients // 4)):
            # A pool of its own, or all channels to one address would share a connection.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.client_channel_id", number)]
            channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(self._address, options=options))
            await channel.channel_ready()
            self._stubs.append(beamline_pb2_grpc.InferenceStub(channel))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, cases: Sequence[pb.TranslateRequest], each: int) -> list[Answered]:
        """Every client asks `each` of the cases, and together they ask all of them if there are enough clients."""
        order = [number % len(cases) for number in range(self._clients * each)]
        self._random.shuffle(order)
        shares = [order[client :: self._clients] for client in range(self._clients)]
        answers = await asyncio.gather(*(self._one(client, share, cases) for client, share in enumerate(shares)))
        return [answer for each_client in answers for answer in each_client]

    async def _one(self, client: int, share: Sequence[int], cases: Sequence[pb.TranslateRequest]) -> list[Answered]:
        stub = self._stubs[client % len(self._stubs)]
        return [Answered(case, await stub.Translate(cases[case])) for case in share]


class CrowdProcess:
    """The same in a process of its own."""

    def __init__(self, address: str, clients: int, each: int, seed: int, **popen: object) -> None:
        command = [sys.executable, "-m", "tests.end_to_end.crowd", address, str(clients), str(each), str(seed)]
        self._process = subprocess.Popen(  # type: ignore[call-overload]
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **popen
        )

    def __enter__(self) -> CrowdProcess:
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, cases: Sequence[pb.TranslateRequest]) -> list[Answered]:
        encoded = [base64.b64encode(case.SerializeToString()).decode() for case in cases]
        output, _ = self._process.communicate(json.dumps(encoded) + "\n")
        return [
            Answered(case, pb.TranslateResponse.FromString(base64.b64decode(response)))
            for case, response in json.loads(output)
        ]


async def _main(address: str, clients: int, each: int, seed: int) -> None:
    async with Crowd(address, clients, seed) as crowd:
        print("ready", flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        cases = [pb.TranslateRequest.FromString(base64.b64decode(case)) for case in json.loads(line)]
        answers = await crowd.ask(cases, each)
    encoded = [(answer.case, base64.b64encode(answer.response.SerializeToString()).decode()) for answer in answers]
    print(json.dumps(encoded), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], *map(int, sys.argv[2:])))
