from __future__ import annotations

import json
import logging

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.call import Call, enter
from beamline.serving.telemetry.logs import ACCESS, JsonFormatter, OncePerSecond, TextFormatter
from tests.serving.doubles import EngineDouble, connected, running


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("beamline.serving.x", logging.WARNING, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    return made


async def test_a_line_of_json_has_the_calls_id() -> None:
    enter(Call(request_id="abc"))
    line = json.loads(JsonFormatter().format(record("took %d ms\nü", 3, fields={"method": "m"})))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "beamline.serving.x",
        "message": "took 3 ms\nü",
        "request_id": "abc",
        "method": "m",
    }
    assert "\n" not in JsonFormatter().format(record("a\nb"))


async def test_a_line_of_text_has_it_once() -> None:
    assert TextFormatter().format(record("hello")) == "hello"
    assert TextFormatter().format(record("hello", request_id="abc")) == "hello [abc]"
    assert TextFormatter().format(record("hello abc", request_id="abc")) == "hello abc"


async def test_exceptions_are_in_the_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        made = record("failed")
        made.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: boom" in json.loads(JsonFormatter().format(made))["exception"]


async def test_every_call_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    async with running(EngineDouble()) as server, connected(server) as stub:
        await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]), metadata=(("x-request-id", "mine"),))
    (line,) = [json.loads(JsonFormatter().format(each)) for each in caplog.records if each.name == ACCESS]
    assert (line["request_id"], line["code"]) == ("mine", "OK")
    assert line["method"] == "/beamline.v1.Inference/Translate"
    assert line["client"] == "ipv4:127.0.0.1"


async def test_an_internal_error_is_in_the_log_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object) -> Exception:
        return RuntimeError("the secret of the house")

    async with running(EngineDouble(answer=broken)) as server, connected(server) as stub:
        with pytest.raises(Exception, match="internal error") as caught:
            await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]), metadata=(("x-request-id", "mine"),))
    assert "secret" not in str(caught.value)
    assert "mine" in str(caught.value)
    assert any(each.exc_info and "mine" in each.getMessage() for each in caplog.records)


def test_what_anybody_can_cause_is_logged_once_a_second() -> None:
    now = 0.0
    limit = OncePerSecond(lambda: now)

    def passes(name: str, number: int) -> str | None:
        made = logging.LogRecord(name, logging.WARNING, __file__, 1, "number %d", (number,), None)
        return made.getMessage() if limit.filter(made) else None

    assert [passes("uvicorn.error", number) for number in range(3)] == ["number 0", None, None]
    assert passes("asyncio", 3) == "number 3"
    assert [passes("beamline.serving.server", number) for number in range(2)] == ["number 0", "number 1"]
    now = 1.0
    assert passes("uvicorn.error", 4) == "number 4 (and 2 more like it)"
    now = 2.0
    assert passes("uvicorn.error", 5) == "number 5"
