"""A crowd of clients, some of them rude: everybody else gets the answers of a quiet server."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.end_to_end.crowd import Answered, Crowd, CrowdProcess
from tests.support.lively import MAX_LENGTH
from tests.support.processes import ROOT, Metrics, ServerProcess, environment, eventually
from tests.support.text import english_lines
from tests.support.ties import TIE, same_or_tie

METHOD = "/beamline.v1.Inference/Translate"
PARTS = 3  # of a text that is split
WORDS = ("value", "function", "class", "module", "statement", "name")


def sequences(request: pb.TranslateRequest) -> int:
    """As how many requests the engine sees it."""
    return PARTS if request.options.split_sentences else len(request.inputs)


def make_cases(count: int, seed: int) -> list[pb.TranslateRequest]:
    """Mixed lengths, beams and options. All of them ask for scores and tokens, to be compared by."""
    chance = random.Random(seed)
    lines = [line.strip() for line in english_lines() if 3 < len(line.strip()) < 100]
    return [_case(chance, lines, number) for number in range(count)]


def _case(chance: random.Random, lines: Sequence[str], number: int) -> pb.TranslateRequest:
    beams = chance.choice((1, 2, 3, 4, 5, 8))
    options = pb.DecodingOptions(
        beam_size=beams, max_length=chance.choice((8, 24, 48)), return_scores=True, return_tokens=True
    )
    changes = {
        1: {"num_hypotheses": beams},
        2: {"length_penalty": chance.choice((-1.0, 0.0, 2.0))},
        3: {"early_stopping": chance.choice((pb.EARLY_STOPPING_TRUE, pb.EARLY_STOPPING_NEVER))},
        4: {"no_repeat_ngram_size": 2, "min_length": 6},
        5: {"repetition_penalty": 1.4},
        6: {"target_prefix": "the value", "max_length": 40},
        7: {"suppress_tokens": chance.sample(range(2, 600), 20)},
        8: {"return_alignment": True},
        9: {"split_sentences": True},
    }
    options.MergeFrom(pb.DecodingOptions(**changes.get(number % 10, {})))  # type: ignore[arg-type]
    texts = [
        " ".join(chance.choice(lines) for _ in range(chance.randint(1, 2))) for _ in range(chance.choice((1, 1, 1, 3)))
    ]
    if options.split_sentences:
        texts = [f"This is a {chance.choice(WORDS)}. " * PARTS]
    return pb.TranslateRequest(inputs=[pb.Input(text=text) for text in texts], options=options)


def check_same(found: pb.TranslateResponse, quiet: pb.TranslateResponse, where: str) -> None:
    assert (found.model, found.version) == (quiet.model, quiet.version)
    assert len(found.translations) == len(quiet.translations), where
    for mine, expected in zip(found.translations, quiet.translations, strict=True):
        assert mine.source_tokens == expected.source_tokens, where
        assert len(mine.hypotheses) == len(expected.hypotheses), where
        for rank, (one, other) in enumerate(zip(mine.hypotheses, expected.hypotheses, strict=True)):
            check_hypothesis(one, other, f"{where}, rank {rank}")


def check_hypothesis(one: pb.Hypothesis, other: pb.Hypothesis, where: str) -> None:
    ids, expected = [token.id for token in one.tokens], [token.id for token in other.tokens]
    swapped = abs(one.score - other.score) < TIE  # two hypotheses of equal worth, in either order
    assert same_or_tie(ids, one.token_log_probs, expected, other.token_log_probs) or swapped, (
        f"{where}: {ids} is not {expected}"
    )
    if ids == expected:
        assert one.text == other.text, where
        assert one.finish_reason == other.finish_reason, where
        assert one.score == pytest.approx(other.score, abs=1e-3, rel=1e-4), where
        assert len(one.alignment) == len(other.alignment), where
        for row, expected_row in zip(one.alignment, other.alignment, strict=True):
            assert list(row.weights) == pytest.approx(list(expected_row.weights), abs=1e-3), where


# -- the rude ones -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Garbage:
    name: str
    data: bytes
    code: grpc.StatusCode
    sentence: str  # a part of it: what would be allowed


def _garbage(
    name: str,
    sentence: str,
    request: pb.TranslateRequest,
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
) -> Garbage:
    return Garbage(name, request.SerializeToString(), code, sentence)


def _one(text: str = "a value", **options: object) -> pb.TranslateRequest:
    asked = pb.DecodingOptions(**options)  # type: ignore[arg-type]
    return pb.TranslateRequest(inputs=[pb.Input(text=text)], options=asked)


_NOT_UTF8 = _one("SPOIL").SerializeToString().replace(b"SPOIL", b"\xff\xfe\xff\xfe\xff")
GARBAGE = (
    _garbage("unknown model", "there is tiny", pb.TranslateRequest(model="nope"), grpc.StatusCode.NOT_FOUND),
    _garbage("unknown version", "there is 1", pb.TranslateRequest(version="7"), grpc.StatusCode.NOT_FOUND),
    _garbage("path as model", "there is tiny", pb.TranslateRequest(model="../x"), grpc.StatusCode.NOT_FOUND),
    _garbage("no inputs", "give 1 to 1024", pb.TranslateRequest()),
    _garbage("empty text", "text is empty", _one("")),
    _garbage("blank text", "text is empty", _one(" \n ")),
    _garbage("empty input", "give text or token_ids", pb.TranslateRequest(inputs=[pb.Input()])),
    _garbage("10 MB text", "longer than 1048576 bytes", _one("word " * 2_000_000)),
    _garbage("too long for the model", f"at most {MAX_LENGTH}", _one("word " * 2000)),
    _garbage("beam 0", "allows 1 to 16", _one(beam_size=0)),
    _garbage("beam 1000", "allows 1 to 16", _one(beam_size=1000)),
    _garbage("many hypotheses", "allows 1 to 2", _one(beam_size=2, num_hypotheses=3)),
    _garbage("max_length", f"allows 2 to {MAX_LENGTH}", _one(max_length=MAX_LENGTH + 1)),
    _garbage("min_length", "0 to max_length", _one(min_length=40, max_length=20)),
    _garbage("length penalty", "from -10 to 10", _one(length_penalty=math.nan)),
    _garbage("repetition penalty", "from 0.01 to 100", _one(repetition_penalty=0.0)),
    _garbage("time limit", "at least 1", _one(time_limit_ms=0)),
    _garbage("suppressed", "ids 0 to", _one(suppress_tokens=[10**6])),
    _garbage("language", "leave it empty", pb.TranslateRequest(source_language="xx", inputs=[pb.Input(text="a")])),
    _garbage("unknown ids", "ids 0 to", pb.TranslateRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[10**6]))])),
    Garbage("invalid UTF-8", _NOT_UTF8, grpc.StatusCode.INVALID_ARGUMENT, "must be UTF-8"),
    Garbage("no message", b"\xff" * 100, grpc.StatusCode.INVALID_ARGUMENT, "can't be decoded"),
)


async def send_garbage(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        send: Any = channel.unary_unary(METHOD, None, None)  # bytes, as they are
        for garbage in GARBAGE:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(garbage.data)
            details = caught.value.details() or ""
            assert (caught.value.code(), garbage.sentence in details) == (garbage.code, True), (
                f"{garbage.name}: {caught.value.code()}, {details}"
            )


async def cancel_midway(address: str) -> int:
    """Cancels a long call while it is decoded, after a short one was answered; how many of the two were answered."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        call = stub.Translate(_one(beam_size=8, min_length=MAX_LENGTH, max_length=MAX_LENGTH))
        # Calls of one connection come in order, and so do their requests: it is answered once the other runs.
        await stub.Translate(_one(beam_size=1, max_length=2))
        if not call.cancel():
            return 2  # this process was held up for as long as the decoding took
        with pytest.raises(asyncio.CancelledError):
            await call
        return 1


async def ask_in_a_hurry(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(_one(min_length=MAX_LENGTH, max_length=MAX_LENGTH), timeout=0.001)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# -- the crowd -----------------------------------------------------------------------------------------------------


async def record_quietly(address: str, cases: Sequence[pb.TranslateRequest]) -> list[pb.TranslateResponse]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        return [await stub.Translate(case) for case in cases]


@dataclass(frozen=True)
class Counts:
    """Requests by outcome, and calls by status."""

    metrics: Metrics

    def outcome(self, name: str) -> int:
        return int(self.metrics("beamline_requests_total", model="tiny", outcome=name))

    def calls(self, code: str) -> int:
        return int(self.metrics("beamline_calls_total", code=code))

    @property
    def finished(self) -> int:
        return int(self.metrics("beamline_requests_total", model="tiny"))


async def settled(server: ServerProcess, finished: int) -> Counts:
    """When at least so many requests have left the engine, nobody is in a slot, and nobody waits. (A client may have
    its answer a moment before it is counted.)"""

    def idle() -> bool:
        metrics = server.metrics()
        waiting = metrics("beamline_active_slots") + metrics("beamline_queue_length")
        return waiting == 0 and Counts(metrics).finished >= finished

    await asyncio.to_thread(eventually, idle, "the engine is idle")
    return Counts(server.metrics())


async def crowd_against_quiet(server: ServerProcess, *, cases: int, clients: int, each: int) -> None:
    """Half of the clients are in this process, the others in two more."""
    requests = make_cases(cases, seed=clients)
    begin = Counts(server.metrics())
    quiet = await record_quietly(server.grpc, requests)
    texts = {hypothesis.text for answer in quiet for t in answer.translations for hypothesis in t.hypotheses}
    assert len(texts) > cases // 2, "the model must be worth comparing on"
    before = await settled(server, begin.finished + sum(map(sequences, requests)))

    near, far = clients // 2, clients // 4
    options = {"cwd": ROOT, "env": environment()}
    with (
        CrowdProcess(server.grpc, far, each, seed=1, **options) as one,
        CrowdProcess(server.grpc, clients - near - far, each, seed=2, **options) as two,
    ):
        async with Crowd(server.grpc, near, seed=3) as crowd:
            found: tuple[list[Answered], list[Answered], list[Answered], None, int, None]
            found = await asyncio.gather(
                crowd.ask(requests, each),
                asyncio.to_thread(one.ask, requests),
                asyncio.to_thread(two.ask, requests),
                send_garbage(server.grpc),
                cancel_midway(server.grpc),
                ask_in_a_hurry(server.grpc),
            )
    answers = [*found[0], *found[1], *found[2]]
    assert len(answers) == clients * each
    for answer in answers:
        check_same(answer.response, quiet[answer.case], f"case {answer.case}: {requests[answer.case]}")

    good = sum(sequences(requests[answer.case]) for answer in answers) + found[4]
    cancelled = 2 - found[4]
    after = await settled(server, before.finished + good + cancelled)
    assert after.outcome("failed") == 0
    # The hurried one may have left in any way, or never have come in.
    assert good + cancelled <= after.finished - before.finished <= good + cancelled + 1
    assert good <= after.outcome("ok") - before.outcome("ok") <= good + cancelled + 1
    assert after.calls("INTERNAL") == 0
    assert after.calls("UNKNOWN") == 0
    for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        expected = sum(garbage.code is code for garbage in GARBAGE)
        assert after.calls(code.name) - before.calls(code.name) == expected, code
    assert after.calls("OK") - before.calls("OK") >= len(answers) + found[4]
    log = server.log.read_text()
    assert "Traceback" not in log, log


async def test_a_crowd_gets_the_answers_of_a_quiet_server(server: ServerProcess) -> None:
    await crowd_against_quiet(server, cases=40, clients=64, each=2)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_a_crowd_that_stays(server: ServerProcess) -> None:
    await crowd_against_quiet(server, cases=200, clients=64, each=30)


async def test_who_leaves_early_is_counted_and_leaves_no_slot(server: ServerProcess) -> None:
    """One after the other, so that the counts are exact."""
    before = after = Counts(server.metrics())
    tries = 0
    while after.outcome("cancelled") == before.outcome("cancelled"):
        # Once is enough, unless this process was held up for as long as the decoding took.
        await cancel_midway(server.grpc)
        tries += 1
        after = await settled(server, before.finished + 2 * tries)
    assert after.outcome("cancelled") - before.outcome("cancelled") == 1
    assert after.outcome("ok") - before.outcome("ok") == 2 * tries - 1
    assert after.outcome("failed") == 0
    assert after.calls("CANCELLED") > before.calls("CANCELLED")
