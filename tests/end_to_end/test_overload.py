"""Five times what a server can do, for a minute. Its short sample, which counts instead of timing, is in
tests/serving/api/grpc/test_limits.py."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.support.processes import PATIENCE, eventually, serving

SLOTS, QUEUE, STEP_MS = 8, 32, 10
TEXT = "x" * 19  # twenty steps: a request keeps its slot for 0.2 s
SERVICE = 20 * STEP_MS / 1000
ONE = pb.TranslateRequest(inputs=[pb.Input(text=TEXT)])


@dataclass
class Load:
    answered: list[float] = field(default_factory=list)  # seconds each took
    refused: list[float] = field(default_factory=list)
    codes: set[grpc.StatusCode] = field(default_factory=set)

    async def one(self, stub: beamline_pb2_grpc.InferenceStub) -> None:
        began = time.monotonic()
        try:
            await stub.Translate(ONE, timeout=PATIENCE)
            self.answered.append(time.monotonic() - began)
        except grpc.aio.AioRpcError as error:
            self.refused.append(time.monotonic() - began)
            self.codes.add(error.code())


async def closed(stub: beamline_pb2_grpc.InferenceStub, seconds: float) -> float:
    """Answers per second where every slot is always busy: the capacity, on this machine, now."""
    load, ends = Load(), time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < ends:
            await load.one(stub)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(2 * SLOTS)))
    return len(load.answered) / (time.monotonic() - began)


async def opened(stub: beamline_pb2_grpc.InferenceStub, rate: float, seconds: float) -> tuple[Load, float]:
    """Calls on a schedule, whatever becomes of them; and how long it took until the last answer."""
    load, began = Load(), time.monotonic()
    calls = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        calls.append(asyncio.ensure_future(load.one(stub)))
    await asyncio.gather(*calls)
    return load, time.monotonic() - began


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(900)
async def test_five_times_the_capacity_for_a_minute(tmp_path: Path) -> None:
    arguments = ("--fake", "--fake-slots", str(SLOTS), "--fake-step-ms", str(STEP_MS), "--max-queue", str(QUEUE))
    with serving(tmp_path / "log.txt", *arguments) as server:
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            capacity = await closed(stub, 10)
            load, seconds = await opened(stub, 5 * capacity, 60)
            after = await closed(stub, 5)
    goodput = len(load.answered) / seconds
    slowest, refusal = percentile(load.answered, 0.99), percentile(load.refused, 0.99)
    print(
        f"capacity {capacity:.1f}/s (ideal {SLOTS / SERVICE:.0f}), offered {5 * capacity:.0f}/s",
        f"goodput {goodput:.1f}/s ({goodput / capacity:.1%}), afterwards {after:.1f}/s",
        f"admitted p50 {percentile(load.answered, 0.5):.3f} s, p99 {slowest:.3f} s",
        f"{len(load.refused)} refused, p50 {percentile(load.refused, 0.5):.4f} s, p99 {refusal:.4f} s",
        sep="\n",
    )
    assert goodput > 0.9 * capacity
    assert load.codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    # Nobody waits longer than a full queue takes to empty, at the speed that was measured; twice that, for the noise.
    assert slowest < 2 * (QUEUE + SLOTS) / capacity + SERVICE
    assert percentile(load.refused, 0.5) < SERVICE
    assert after > 0.9 * capacity


PROCESSES, CHANNELS, CALLS = 5, 10, 1000  # calls of each process


async def burst(address: str, together: Any) -> Counter[str]:
    """What all calls, sent at once over several connections, were told."""
    found: Counter[str] = Counter()

    async def one(channel: grpc.aio.Channel) -> None:
        try:
            await beamline_pb2_grpc.InferenceStub(channel).Translate(ONE, timeout=5 * PATIENCE)
            found["OK"] += 1
        except grpc.aio.AioRpcError as error:
            hint = "grpc-retry-pushback-ms" in dict(error.trailing_metadata())
            found[f"{error.code().name}{'' if hint else ' without a hint'}"] += 1

    # A pool of its own, or all channels to one address would share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    together.wait()
    await asyncio.gather(*(one(channels[number % CHANNELS]) for number in range(CALLS)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return found


def burst_process(address: str, together: Any, found: Any) -> None:
    found.put(asyncio.run(burst(address, together)))


@pytest.mark.full
def test_thousands_of_calls_at_once_are_all_answered_and_counted(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(PROCESSES), context.Queue()
    arguments = ("--fake", "--fake-slots", str(SLOTS), "--fake-step-ms", "1", "--max-queue", str(QUEUE))
    with serving(tmp_path / "log.txt", *arguments) as server:
        clients = [
            context.Process(target=burst_process, args=(server.grpc, together, answers)) for _ in range(PROCESSES)
        ]
        for client in clients:
            client.start()
        found = sum((answers.get(timeout=5 * PATIENCE) for _ in clients), Counter[str]())
        for client in clients:
            client.join()
        print(dict(found))
        assert set(found) == {"OK", "RESOURCE_EXHAUSTED"}
        assert sum(found.values()) == PROCESSES * CALLS
        eventually(lambda: server.metrics()("beamline_calls_total") == PROCESSES * CALLS, "all are counted")
        metrics = server.metrics()
    assert {code: metrics("beamline_calls_total", code=code) for code in found} == found
    assert metrics("beamline_refused_total", reason="overloaded") == found["RESOURCE_EXHAUSTED"]
