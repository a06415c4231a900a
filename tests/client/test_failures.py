"""Deadlines, cancellation, repeated attempts, and servers that are not there or not what was meant."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import pytest

from beamline import AsyncClient, Client
from beamline._failures import Attempts
from beamline.errors import (
    BeamlineError,
    Cancelled,
    DeadlinePassed,
    Forbidden,
    InternalError,
    InvalidRequest,
    Misconnected,
    Overloaded,
    Unavailable,
    Unimplemented,
)
from beamline.protos import beamline_pb2_grpc
from tests.client.callers import Refusal, Scripted, SyncCaller, scripted, texts
from tests.client.conftest import MakeCaller
from tests.serving.doubles import WAIT_SECONDS, EngineDouble, eventually, running
from tests.serving.fake_lm import GatedEngine, serving
from tests.support.processes import ROOT, environment

UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


def _more(things: list[Any], before: int) -> bool:
    return len(things) > before


class TestDeadlinesAndCancellation:
    async def test_a_deadline_is_over_and_the_slot_is_free(self, caller: MakeCaller) -> None:
        engine = EngineDouble(held=True)
        async with running(engine) as server:
            client = caller(server.grpc_address, timeout=600)
            with pytest.raises(DeadlinePassed, match=r"timeout of 0\.3 s"):
                await client("translate", "a", timeout=0.3)
            await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))
            with pytest.raises(DeadlinePassed):
                await client("translate", ["a"] * 40, timeout=0.3)
            await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))
            with pytest.raises(DeadlinePassed):  # so for every item
                await client("translate", ["a"] * 40, timeout=0.3, return_errors=True)

    async def test_a_cancelled_task_cancels_its_calls(self) -> None:
        engine = EngineDouble(held=True)
        async with running(engine) as server, AsyncClient(server.grpc_address) as client:
            for given in ("a", ["a"] * 40):
                task = asyncio.ensure_future(client.translate(given))
                before = len(engine.submitted)
                await engine.until(partial(_more, engine.submitted, before))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))

    async def test_an_interpreter_that_ends_waits_for_no_list(self) -> None:
        code = """if True:
            import sys, threading
            from beamline import Client
            client = Client(sys.argv[1])
            threading.Thread(target=client.translate, args=(["a"] * 400,), daemon=True).start()
            sys.stdin.readline()
            """
        engine = EngineDouble(held=True)
        async with running(engine) as server:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code, server.grpc_address),
                cwd=ROOT,
                env=environment(),
                stdin=asyncio.subprocess.PIPE,
            )
            await engine.until(lambda: len(engine.submitted) > 16)
            await asyncio.wait_for(child.communicate(b"\n"), WAIT_SECONDS)
            assert child.returncode == 0
            await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))

    async def test_a_stream_that_is_closed_is_cancelled(self, caller: MakeCaller) -> None:
        engine = GatedEngine(gate=True)
        async with serving(engine) as server:
            client = caller(server.grpc_address)
            engine.permit(4)
            pieces = await client.pieces("generate_stream", "A long prompt that is echoed", first=1)
            assert len(pieces) == 1
            await engine.until(lambda _: len(engine.cancelled) == 1)

    async def test_a_closed_synchronous_stream_is_cancelled_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not only when the garbage collector comes to the call: here the call is kept."""
        engine = GatedEngine(gate=True)
        async with serving(engine) as server:
            with Client(server.grpc_address) as client:
                kept: list[Any] = []
                opened = client._channel.unary_stream

                def keeping(*arguments: Any) -> Any:
                    method: Any = opened(*arguments)

                    def call(*given: Any, **options: Any) -> Any:
                        kept.append(method(*given, **options))
                        return kept[-1]

                    return call

                monkeypatch.setattr(client._channel, "unary_stream", keeping)
                engine.permit(4)
                stream = client.generate_stream("A long prompt that is echoed")
                await asyncio.to_thread(next, stream)
                stream.close()
                await engine.until(lambda _: len(engine.cancelled) == 1)
                assert kept[0].cancelled()

    async def test_a_cancelled_task_cancels_its_stream(self) -> None:
        engine = EngineDouble(held=True)
        async with running(engine) as server, AsyncClient(server.grpc_address) as client:

            async def read() -> None:
                async with aclosing(client.translate_stream("a")) as stream:
                    async for _ in stream:
                        pass

            task = asyncio.ensure_future(read())
            await engine.until(lambda: len(engine.submitted) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.until(lambda: len(engine.cancelled) == 1)

    @pytest.mark.parametrize("given", ["a", ["a"] * 40])
    async def test_closing_the_client_cancels_what_is_in_flight(self, caller: MakeCaller, given: Any) -> None:
        engine = EngineDouble(held=True)
        async with running(engine) as server:
            client = caller(server.grpc_address)
            task = asyncio.ensure_future(client("translate", given))
            await engine.until(lambda: len(engine.submitted) >= 1)
            await client.close()
            with pytest.raises((Cancelled, BeamlineError), match="this client is closed"):
                await task
            await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))
            with pytest.raises(BeamlineError, match="this client is closed"):
                await client("translate", "a")
            with pytest.raises(BeamlineError, match="this client is closed"):
                await client.pieces("translate_stream", "a")

    @pytest.mark.parametrize("method", ["translate", "translate_stream"])
    async def test_closing_the_client_ends_what_waits_for_another_attempt(
        self, caller: MakeCaller, method: str
    ) -> None:
        servicer = Scripted(Refusal(EXHAUSTED, pushback_ms=3_600_000))
        async with scripted(servicer) as target:
            client = caller(target)
            call = client(method, "a") if method == "translate" else client.pieces(method, "a")
            task = asyncio.ensure_future(call)
            await eventually(lambda: len(servicer.calls) == 1)
            await client.close()
            with pytest.raises(Cancelled, match="this client is closed"):
                await asyncio.wait_for(task, WAIT_SECONDS)

    def test_a_timeout_of_centuries(self) -> None:
        with Client("127.0.0.1:1", retries=0) as client:
            for timeout in (1e10, threading.TIMEOUT_MAX, 10**400):
                with pytest.raises(Unavailable):
                    client.translate("a", timeout=timeout)

    def test_a_client_does_not_outlive_a_fork(self) -> None:
        code = """if True:
            import os
            from beamline import Client
            client = Client("127.0.0.1:1", retries=0)
            if os.fork() == 0:
                try:
                    client.translate("a")
                except Exception as error:
                    print(error, flush=True)
                os._exit(0)
            os.wait()
            """
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.stdout == "this client was made before the process forked: make one in the child\n", done.stderr

    async def test_one_failure_ends_the_other_calls(self, caller: MakeCaller) -> None:
        engine = EngineDouble(held=True)
        async with running(engine) as server:
            with pytest.raises(InvalidRequest):
                await caller(server.grpc_address)("translate", [*["a"] * 39, ""])
            await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))

    def test_another_event_loop_is_refused(self) -> None:
        client = AsyncClient("127.0.0.1:1", retries=0)

        async def ask() -> None:
            await client.models()

        with pytest.raises(Unavailable):
            asyncio.run(ask())
        with pytest.raises(BeamlineError, match="another event loop"):
            asyncio.run(ask())


class TestRetries:
    @pytest.mark.parametrize(
        "script",
        [
            [Refusal(UNAVAILABLE), Refusal(EXHAUSTED)],
            [Refusal(EXHAUSTED, pushback_ms=1), Refusal(UNAVAILABLE, pushback_ms=20)],
        ],
    )
    async def test_it_tries_again(self, caller: MakeCaller, script: list[Refusal]) -> None:
        servicer = Scripted(*script)
        async with scripted(servicer) as target:
            assert (await caller(target)("translate", "a", timeout=60)).text == "a"
        assert len(servicer.calls) == 3

    async def test_a_stream_that_has_not_begun_too(self, caller: MakeCaller) -> None:
        servicer = Scripted(Refusal(UNAVAILABLE), Refusal(EXHAUSTED, pushback_ms=1))
        async with scripted(servicer) as target:
            assert texts(await caller(target).pieces("translate_stream", "abc")) == ["a", "b", "c"]
        assert len(servicer.calls) == 3

    @pytest.mark.parametrize("code", [UNAVAILABLE, EXHAUSTED])
    async def test_never_after_a_first_piece(self, caller: MakeCaller, code: grpc.StatusCode) -> None:
        servicer = Scripted(after_first_piece=Refusal(code, pushback_ms=1))
        async with scripted(servicer) as target:
            with pytest.raises(Unavailable if code is UNAVAILABLE else Overloaded):
                await caller(target).pieces("translate_stream", "abc")
        assert len(servicer.calls) == 1

    async def test_so_often_and_no_more(self, caller: MakeCaller) -> None:
        for retries in (0, 2):
            servicer = Scripted(*[Refusal(EXHAUSTED, "the queue is full", pushback_ms=1)] * 9)
            async with scripted(servicer) as target:
                with pytest.raises(Overloaded, match="the queue is full") as found:
                    await caller(target, retries=retries)("translate", "a")
            assert found.value.retry_after == 0.001
            assert len(servicer.calls) == retries + 1

    @pytest.mark.parametrize(
        ("refusal", "kind"),
        [
            (Refusal(EXHAUSTED, pushback_ms=-1), Overloaded),  # gRPC's way of saying: not again
            (Refusal(EXHAUSTED, pushback_ms=10_000_000), Overloaded),  # beyond the deadline
            (Refusal(grpc.StatusCode.INVALID_ARGUMENT), InvalidRequest),
            (Refusal(grpc.StatusCode.INTERNAL), InternalError),
            (Refusal(grpc.StatusCode.DATA_LOSS), InternalError),
            (Refusal(grpc.StatusCode.PERMISSION_DENIED), Forbidden),
            (Refusal(grpc.StatusCode.CANCELLED), Cancelled),
            (Refusal(grpc.StatusCode.DEADLINE_EXCEEDED), DeadlinePassed),
        ],
    )
    async def test_not_what_would_fail_again(
        self, caller: MakeCaller, refusal: Refusal, kind: type[BeamlineError]
    ) -> None:
        servicer = Scripted(refusal)
        async with scripted(servicer) as target:
            with pytest.raises(kind):
                await caller(target)("translate", "a", timeout=600)
        assert len(servicer.calls) == 1

    async def test_of_a_list_only_what_was_refused_is_sent_again(self, caller: MakeCaller) -> None:
        servicer = Scripted(None, Refusal(EXHAUSTED, pushback_ms=1))
        given = [str(number) for number in range(40)]
        async with scripted(servicer) as target:
            assert texts(await caller(target, in_flight=16)("translate", given)) == given
        assert [len(call.inputs) for call in servicer.calls] == [16, 16, 16, 8]

    async def test_a_limit_of_calls_makes_a_list_slow_and_not_fail(self, caller: MakeCaller) -> None:
        given = [str(number) for number in range(300)]
        async with running(EngineDouble(), max_calls_per_client=1) as server:
            assert texts(await caller(server.grpc_address)("translate", given)) == given

    def test_attempts_begin_anew_while_the_others_of_a_list_are_answered(self) -> None:
        refused = Overloaded("full", retry_after=0.001)
        one = Attempts(2, None)
        other = one.again()
        for _ in range(3):
            assert other.delay(refused) > 0
            assert other.delay(refused) > 0
            with pytest.raises(Overloaded):
                other.delay(refused)
            one.answered()

    def test_no_server_is_waited_for_until_the_deadline_and_without_one_a_number_of_times(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 0.0
        monkeypatch.setattr("beamline._failures.time.monotonic", lambda: now)
        gone = Unavailable("gone")
        patient = Attempts(2, 60)
        for _ in range(100):
            try:
                now += patient.delay(gone)
            except Unavailable:
                break
        assert 50 < now < 60
        for attempts, failure in ((Attempts(2, None), gone), (Attempts(2, 60), Overloaded("full"))):
            assert attempts.delay(failure) > 0
            assert attempts.delay(failure) > 0
            with pytest.raises(type(failure)):
                attempts.delay(failure)
        with pytest.raises(Unavailable):
            Attempts(0, 60).delay(gone)

    async def test_a_server_that_comes_back_is_found(self, caller: MakeCaller) -> None:
        servicer = Scripted()
        async with scripted(servicer) as target:
            client = caller(target, retries=50)
            await client("translate", "a")
        task = asyncio.ensure_future(client("translate", "b"))
        server = grpc.aio.server()
        beamline_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        assert server.add_insecure_port(target)
        await server.start()
        try:
            assert (await task).text == "b"
        finally:
            await server.stop(None)


class TestWhatIsThere:
    async def test_nothing(self, caller: MakeCaller) -> None:
        with pytest.raises(Unavailable) as found:
            await caller("127.0.0.1:1", retries=1)("translate", "a")
        assert str(found.value) == (
            "nothing answers at 127.0.0.1:1: start a server with `beamline serve`, "
            "or say where it is (target, --target or BEAMLINE_TARGET)"
        )
        with pytest.raises(Unavailable, match="nothing answers"):
            await caller("127.0.0.1:1", retries=0)("translate", ["a", 3.5, "b"], return_errors=True)
        with pytest.raises(Unavailable, match="nothing answers"):
            await caller("127.0.0.1:1", retries=0).pieces("translate_stream", "a")

    async def test_an_unknown_name(self, caller: MakeCaller) -> None:
        with pytest.raises(Unavailable, match=r"the host name of nosuch\.invalid:8001 is not known"):
            await caller("nosuch.invalid:8001", retries=0)("models")

    async def test_the_http_port(self, caller: MakeCaller) -> None:
        async with running(EngineDouble(), http_port=0) as server:
            for address in (server.http_address, server.metrics_address):
                with pytest.raises(Misconnected, match="that is an HTTP port"):
                    await caller(address)("translate", "a")

    async def test_another_grpc_server(self, caller: MakeCaller) -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with pytest.raises(Unimplemented, match="speaks gRPC, but has no such method"):
                await caller(f"127.0.0.1:{port}")("translate", "a")
        finally:
            await server.stop(None)


async def test_one_client_serves_many_threads() -> None:
    def ask(client: Client, thread: int, gate: threading.Barrier) -> list[str]:
        gate.wait()
        given = [f"{thread}.{number}" for number in range(60)]
        streamed = "".join(texts(list(client.translate_stream(given[0]))))
        return [*texts(client.translate(given)), client.translate(given[-1]).text, streamed]

    async with running(EngineDouble()) as server:
        caller = SyncCaller(server.grpc_address)
        gate = threading.Barrier(8)

        def run() -> list[list[str]]:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(lambda thread: ask(caller.client, thread, gate), range(8)))

        found = await asyncio.to_thread(run)
        await caller.close()
    for thread, answers in enumerate(found):
        assert answers == [*(f"{thread}.{number}" for number in range(60)), f"{thread}.59", f"{thread}.0"]
