from __future__ import annotations

from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.outputs import Result
from beamline.serving.engine.request import Request
from beamline.serving.errors import ComputeError
from tests.serving.doubles import EngineDouble, connected, echo, eventually, ids, running
from tests.serving.fake_lm import GatedEngine, serving


def request(*texts: str, model: str = "", version: str = "", **options: object) -> pb.TranslateRequest:
    return pb.TranslateRequest(
        model=model,
        version=version,
        inputs=[pb.Input(text=text) for text in texts],
        options=pb.DecodingOptions(**options),  # type: ignore[arg-type]
    )


async def refusal(engine: EngineDouble, message: pb.TranslateRequest) -> tuple[grpc.StatusCode, str]:
    async with running(engine) as server, connected(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(message)
    return caught.value.code(), caught.value.details() or ""


async def test_a_batch_is_answered_in_order() -> None:
    engine = EngineDouble()
    async with running(engine) as server, connected(server) as stub:
        response = await stub.Translate(request("one", "zwei ü", return_scores=True, num_hypotheses=2))
    assert (response.model, response.version) == ("fake", "1")
    texts = [[hypothesis.text for hypothesis in each.hypotheses] for each in response.translations]
    assert texts == [["one", "one"], ["zwei ü", "zwei ü"]]
    assert response.translations[0].hypotheses[1].score == -2.0
    assert [each.source_tokens for each in response.translations] == [4, 8]
    assert [sent.source for sent in engine.submitted] == [ids("zwei ü"), ids("one")]  # longest first


async def test_a_long_text_is_split_translated_and_joined() -> None:
    text = "\n".join(["A sentence of some words. And another, longer one!"] * 500) + "\n" + "x" * 1000
    engine = EngineDouble(capacity=16)
    async with running(engine, text=TextLimits(max_in_flight=8)) as server, connected(server) as stub:
        response = await stub.Translate(request(text, split_sentences=True))
    assert response.translations[0].hypotheses[0].text == text
    assert len(engine.submitted) > 1000
    assert engine.most_waiting <= 8


@pytest.mark.parametrize("options", [{}, {"beam_size": 3, "num_hypotheses": 2}, {"temperature": 1.0}], ids=str)
async def test_a_stop_string_ends_every_part_before_it(options: dict[str, Any]) -> None:
    """Whatever is streamed, and whatever the engine did until it heard of it."""
    engine = GatedEngine("translate")
    texts = ["one STO two STOP" + 400 * "x", "and more"]
    asked = request(*texts, stop=["STOP", "never"], return_tokens=True, return_scores=True, **options)
    async with serving(engine) as server, connected(server) as stub:
        response = await stub.Translate(asked)
        replies = [reply async for reply in stub.TranslateStream(asked)]
    stopped, whole = response.translations
    for hypothesis in stopped.hypotheses:
        assert (hypothesis.text, hypothesis.finish_reason) == ("one STO two ", pb.FINISH_REASON_STOP)
        assert len(hypothesis.tokens) == len(hypothesis.token_log_probs) == 16
    assert whole.hypotheses[0].text == "and more"
    assert "".join(reply.text for reply in replies if reply.input == 0) == "one STO two "
    # Neither waits for the other, so either may end first.
    ended = [(reply.input, reply.translation.hypotheses[0].text) for reply in replies if reply.HasField("translation")]
    assert sorted(ended) == [(0, "one STO two "), (1, "and more")]
    assert engine.decoded_steps < 2 * 400  # the device stopped soon after


@pytest.mark.parametrize(
    ("message", "code", "sentence"),
    [
        (request("a", model="nl"), grpc.StatusCode.NOT_FOUND, "there is no model 'nl' here; there is fake"),
        (request("a", version="7"), grpc.StatusCode.NOT_FOUND, "has no version '7' here; there is 1"),
        (request(""), grpc.StatusCode.INVALID_ARGUMENT, "inputs[0].text is empty"),
        (request(), grpc.StatusCode.INVALID_ARGUMENT, "give 1 to 1024"),
        (request("a", beam_size=0), grpc.StatusCode.INVALID_ARGUMENT, "allows 1 to 8"),
        (request("a", stop=["b", ""]), grpc.StatusCode.INVALID_ARGUMENT, "stop[1] has 0 characters; a stop string"),
        (request("a", beam_size=1000), grpc.StatusCode.INVALID_ARGUMENT, "allows 1 to 8"),
        (request("a", max_length=81), grpc.StatusCode.INVALID_ARGUMENT, "allows 2 to 80"),
        (request("a" * 10_000_000), grpc.StatusCode.INVALID_ARGUMENT, "longer than 1048576 bytes"),
        (request("a" * 5000), grpc.StatusCode.INVALID_ARGUMENT, "5001 tokens; this model reads at most 64"),
    ],
    ids=lambda value: "" if isinstance(value, pb.TranslateRequest) else str(value)[:30],
)
async def test_what_is_wrong_is_said(message: pb.TranslateRequest, code: grpc.StatusCode, sentence: str) -> None:
    engine = EngineDouble()
    found, details = await refusal(engine, message)
    assert found is code
    assert sentence in details
    assert engine.submitted == []


async def test_a_full_queue_is_resource_exhausted() -> None:
    code, details = await refusal(EngineDouble(capacity=0), request("a"))
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


async def test_an_engine_that_drains_is_unavailable() -> None:
    engine = EngineDouble()
    engine.draining = True
    assert (await refusal(engine, request("a")))[0] is grpc.StatusCode.UNAVAILABLE


async def test_one_text_that_fails_fails_the_call_without_showing_why() -> None:
    def second_fails(asked: Request) -> Result | Exception:
        return ComputeError("secret device state") if asked.source == ids("b") else echo(asked)

    code, details = await refusal(EngineDouble(answer=second_fails), request("a", "b", "c"))
    assert code is grpc.StatusCode.INTERNAL
    assert details.startswith("the model could not compute this request (request id ")
    assert "secret" not in details


async def test_an_unexpected_exception_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    def broken(asked: Request) -> Result | Exception:
        raise ZeroDivisionError("secret")

    code, details = await refusal(EngineDouble(answer=broken), request("a"))
    assert code is grpc.StatusCode.INTERNAL
    assert details.startswith("internal error (request id ")
    request_id = details.removeprefix("internal error (request id ").removesuffix(")")
    (record,) = [record for record in caplog.records if request_id in record.getMessage()]
    assert record.exc_info is not None


async def test_calls_and_refusals_are_counted() -> None:
    engine = EngineDouble()
    async with running(engine) as server, connected(server) as stub:
        await stub.Translate(request("a"))
        for wrong in (request("a", model="nl"), request("")):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Translate(wrong)
        sample = server.metrics.registry.get_sample_value
        method = "/beamline.v1.Inference/Translate"
        codes = ("OK", "NOT_FOUND", "INVALID_ARGUMENT")
        calls = [{"method": method, "code": code} for code in codes]
        await eventually(lambda: [sample("beamline_calls_total", call) for call in calls] == [1, 1, 1])
        assert sample("beamline_refused_total", {"reason": "model_not_found"}) == 1
        assert sample("beamline_refused_total", {"reason": "invalid"}) == 1
