"""Clients that check every answer, and what happens to them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.protos import open_inference_pb2 as oip
from tests.chaos.server import ChaosServer, Life, add_model

LINES = (
    "Save the file.",
    "The file could not be opened.",
    "I have lost my keys, and it is raining.",
    "Click the button to close the window and save your changes.",
    "How are you today?",
    "The connection to the server was lost; please check the network settings and try again later.",
)
BEAMS = (1, 4)
CLIENTS = 6
CALL_SECONDS = 60.0
WARM_UP = 600.0  # seconds; a shorter run takes a third of its time
GROWTH = 1.05
# What may become of a call, besides an answer, while servers end and models are exchanged.
ALLOWED = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
OF_A_MODEL_THAT_COMES_AND_GOES = ALLOWED | {"NOT_FOUND"}
Question = tuple[str, int]


class Chaos:
    def __init__(self, folder: Path, seconds: float, chance: random.Random) -> None:
        self._server = ChaosServer(folder)
        self._seconds = seconds
        self._chance = chance
        self._expected: dict[Question, str] = {}
        self._problems: list[str] = []
        self._outcomes: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._may_call = asyncio.Event()
        self._running = 0
        self._over = asyncio.Event()
        self._counts_checked = 0

    async def run(self) -> list[str]:
        self._server.make_repository()
        await self._server.start()
        try:
            await self._learn()
            await self._chaos()
            await self._check_counts()
            if await self._server.end(signal.SIGTERM) != 0:
                self._problems.append("the last server did not end with 0")
        finally:
            self._server.life.process.kill()
        self._check_growth()
        return self._problems

    def report(self) -> str:
        processes = f"{len(self._server.lives)} processes, counts checked {self._counts_checked} times"
        return f"{processes}; faults: {dict(self._faults)}; calls: {dict(sorted(self._outcomes.items()))}"

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        """What a quiet server answers."""
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            for line in LINES:
                for beam in BEAMS:
                    reply = await stub.Translate(_request("en-de", line, beam))
                    self._expected[line, beam] = reply.translations[0].hypotheses[0].text

    async def _client(self, number: int) -> None:
        """Asks for as long as the chaos lasts; a status that is not allowed is a problem, and so is silence."""
        chance = random.Random(number)
        while not self._over.is_set():
            async with grpc.aio.insecure_channel(
                self._server.grpc, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                stub = beamline_pb2_grpc.InferenceStub(channel)
                for _ in range(chance.randint(1, 50)):
                    if self._over.is_set():
                        return
                    await self._may_call.wait()
                    await self._ask(stub, chance)

    async def _ask(self, stub: beamline_pb2_grpc.InferenceStub, chance: random.Random) -> None:
        line, beam = chance.choice(LINES), chance.choice(BEAMS)
        model = chance.choice(("en-de", "en-de", "copy"))
        life = self._server.life
        self._running += 1
        try:
            if chance.random() < 0.3:
                text = ""
                async for piece in stub.TranslateStream(_request(model, line, beam), timeout=CALL_SECONDS):
                    text += piece.text
            else:
                reply = await stub.Translate(_request(model, line, beam), timeout=CALL_SECONDS)
                text = reply.translations[0].hypotheses[0].text
            self._note(life, "OK")
            if text != self._expected[line, beam]:
                self._problems.append(f"{line!r} with {beam} beams: {text!r}, not {self._expected[line, beam]!r}")
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            self._note(life, code)
            allowed = ALLOWED if model == "en-de" else OF_A_MODEL_THAT_COMES_AND_GOES
            if code not in allowed:
                self._problems.append(f"{code}: {error.details()}")
            await asyncio.sleep(chance.uniform(0, 0.2))
        finally:
            self._running -= 1

    def _note(self, life: Life, code: str) -> None:
        self._outcomes[code] += 1
        if life is self._server.life:
            life.saw(code)
        else:
            self._server.life.uncertain += 1  # whose answer it was is not known

    # -- faults ----------------------------------------------------------------------------------------------------

    async def _chaos(self) -> None:
        self._may_call.set()
        clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        sampler = asyncio.create_task(self._sample())
        faults: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (4, self._overload),
            (4, self._cancel),
            (4, self._slow_reader),
            (4, self._garbage),
            (2, self._replace_a_model),
            (2, self._reload),
            (0.25, self._stop),
            (0.25, self._kill),
        ]
        ends = time.monotonic() + self._seconds
        # The last two thirds belong to one process, whose memory is compared.
        settled = time.monotonic() + self._seconds / 3
        while time.monotonic() < ends:
            usable = faults if time.monotonic() < settled else faults[:-2]
            fault = self._chance.choices([each for _, each in usable], [weight for weight, _ in usable])[0]
            self._faults[fault.__name__.strip("_")] += 1
            await fault()
            await asyncio.sleep(self._chance.uniform(0, 1))
        self._over.set()
        _, silent = await asyncio.wait(clients, timeout=2 * CALL_SECONDS)
        if silent:
            self._problems.append(f"{len(silent)} clients wait for an answer")
        for task in (*silent, sampler):
            task.cancel()
        for task in clients:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self._problems.append(f"a client failed: {error!r}")

    async def _sample(self) -> None:
        while True:
            with suppress(OSError, StopIteration):  # it may just be ended
                self._server.life.sample()
            await asyncio.sleep(2)

    async def _overload(self) -> None:
        """Three times as much as slots and queue hold."""
        life = self._server.life
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)

            async def one(number: int) -> None:
                line = LINES[number % len(LINES)]
                try:
                    reply = await stub.Translate(_request("en-de", line, 1), timeout=CALL_SECONDS)
                    self._note(life, "OK")
                    if reply.translations[0].hypotheses[0].text != self._expected[line, 1]:
                        self._problems.append(f"wrong under overload: {line!r}")
                except grpc.aio.AioRpcError as error:
                    self._note(life, error.code().name)
                    if error.code().name not in ALLOWED:
                        self._problems.append(f"under overload {error.code().name}: {error.details()}")

            await asyncio.gather(*(one(number) for number in range(3 * (8 + 16))))

    async def _cancel(self) -> None:
        self._server.life.uncertain += 5  # refused or cancelled: nobody knows
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            calls = [stub.TranslateStream(_request("en-de", LINES[5], 4)) for _ in range(5)]
            await asyncio.sleep(self._chance.uniform(0, 0.2))
            for call in calls:
                call.cancel()

    async def _slow_reader(self) -> None:
        body = json.dumps({"model": "en-de", "inputs": [{"text": line} for line in 20 * LINES]})
        head = "POST /v1/translate HTTP/1.1\r\nhost: a\r\naccept: text/event-stream\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        self._server.life.uncertain += 1
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*self._server.http.split(":"), limit=1024)
            writer.write((head + body).encode())
            await asyncio.sleep(self._chance.uniform(0, 2))
            writer.transport.abort()

    async def _garbage(self) -> None:
        self._server.life.uncertain += 1  # it may begin with a whole request
        for address in (self._server.grpc, self._server.http, self._server.metrics):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(*address.split(":"))
                begun = self._chance.choice(
                    [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v1/translate HTTP/1.1\r\n"]
                )
                writer.write(begun + self._chance.randbytes(self._chance.randint(0, 5000)))
                await asyncio.sleep(0.05)
                writer.transport.abort()

    async def _replace_a_model(self) -> None:
        await asyncio.to_thread(add_model, self._server.repository, "copy")

    async def _reload(self) -> None:
        method = "/inference.GRPCInferenceService/RepositoryModelLoad"
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            load = channel.unary_unary(
                method, oip.RepositoryModelLoadRequest.SerializeToString, oip.RepositoryModelLoadResponse.FromString
            )
            with suppress(grpc.aio.AioRpcError):  # the folder may just be exchanged
                await load(oip.RepositoryModelLoadRequest(model_name="copy"), timeout=CALL_SECONDS)

    async def _stop(self) -> None:
        await self._check_counts()
        code = await self._server.end(signal.SIGTERM)
        if code != 0:
            self._problems.append(f"a server that was asked to end exited with {code}")
        await self._server.start()

    async def _kill(self) -> None:
        await self._server.end(signal.SIGKILL)
        await self._server.start()

    # -- afterwards ------------------------------------------------------------------------------------------------

    async def _check_counts(self) -> None:
        """With clients held still: what they saw of this process is what it has counted."""
        self._may_call.clear()
        while self._running:
            await asyncio.sleep(0.05)
        counted, life = await asyncio.to_thread(self._server.counted), self._server.life
        seen, found = life.seen.get("RESOURCE_EXHAUSTED", 0), counted.get("overloaded", 0)
        if not seen <= found <= seen + life.uncertain:
            unseen = f"and {life.uncertain} calls had no reader"
            self._problems.append(f"clients were refused {seen} times {unseen}; the server counted {found:g}")
        refused = sum(counted.get(reason, 0) for reason in ("overloaded", "slow_reader", "too_large"))
        if refused != (status := counted.get("code:RESOURCE_EXHAUSTED", 0)):
            self._problems.append(f"{refused:g} refusals for {status:g} calls with RESOURCE_EXHAUSTED")
        self._counts_checked += 1
        self._may_call.set()

    def _check_growth(self) -> None:
        samples = max((life.samples for life in self._server.lives), key=len)
        warm_up = min(WARM_UP, self._seconds / 3)
        warm = [each for each in samples if abs(each.seconds - warm_up) <= warm_up / 5]
        late = [each for each in samples if each.seconds >= samples[-1].seconds - warm_up / 5]
        if len(warm) < 10 or late[0].seconds < 1.5 * warm_up:
            self._problems.append("no process lived long enough to compare its memory")
            return
        # Medians of some minutes: a crowd comes and goes, and a model that is replaced is there twice for a moment.
        for name in ("resident", "files"):
            before, after = (statistics.median(getattr(each, name) for each in part) for part in (warm, late))
            print(f"{name}: {before:,.0f} about second {warm_up:.0f}, {after:,.0f} at the end", flush=True)
            if after > GROWTH * before:
                self._problems.append(f"{name} grew from {before:,.0f} to {after:,.0f}")


def _request(model: str, line: str, beam: int) -> pb.TranslateRequest:
    return pb.TranslateRequest(
        model=model, inputs=[pb.Input(text=line)], options=pb.DecodingOptions(beam_size=beam, num_hypotheses=1)
    )
