"""Streams of the JSON gateway: server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2 as httpx
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.api.inference import Inference
from beamline.serving.errors import Overloaded
from tests.serving.api.http.gateway import ONE, gateway
from tests.serving.doubles import WAIT_SECONDS, eventually

Replies = AsyncGenerator[pb.TranslateReply]


async def stream_words(self: Inference, request: pb.TranslateRequest, deadline: float | None) -> Replies:
    """A stream that can fail in the middle."""
    for word in request.inputs[0].text.split():
        if word == "fail":
            raise Overloaded("no more")
        yield pb.TranslateReply(text=word)


EVENTS: list[tuple[str, int, list[Any]]] = [
    ("a " * 40, 200, [*[{"text": "a"}] * 40, "end"]),
    ("a ü c", 200, [{"text": "a"}, {"text": "ü"}, {"text": "c"}, "end"]),
    ("", 200, ["end"]),
    ("fail", 429, []),
    ("a fail", 200, [{"text": "a"}, "error"]),
]


def events_of(answer: httpx.Response) -> list[Any]:
    """The data of messages, and the names of the other events."""
    return [
        event.split("\n")[0].removeprefix("event: ")
        if event.startswith("event: ")
        else json.loads(event.removeprefix("data: "))
        for event in answer.text.split("\n\n")[:-1]
    ]


async def test_streams_are_server_sent_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inference, "TranslateStream", stream_words)
    async with gateway() as (_, client):
        for text, status, events in EVENTS:
            body = {"inputs": [{"text": text}]}
            answer = await client.post("/v1/translate", json=body, headers={"accept": "text/event-stream"})
            assert answer.status_code == status
            if status == 200:
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert events_of(answer) == events
        assert (await client.post("/v1/translate", json=ONE)).json()["model"] == "fake"


async def test_a_stream_ends_when_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()

    async def endless(self: Inference, request: pb.TranslateRequest, deadline: float | None) -> Replies:
        try:
            yield pb.TranslateReply(text="a")
            await asyncio.Event().wait()
        finally:
            closed.set()

    monkeypatch.setattr(Inference, "TranslateStream", endless)
    async with gateway() as (server, client):
        headers = {"accept": "text/event-stream"}
        async with client.stream("POST", "/v1/translate", json=ONE, headers=headers) as answer:
            assert await anext(answer.aiter_lines()) == 'data: {"text":"a"}'
        await asyncio.wait_for(closed.wait(), WAIT_SECONDS)
        sample, call = server.metrics.registry.get_sample_value, {"method": "POST /v1/translate", "code": "CANCELLED"}
        await eventually(lambda: sample("beamline_calls_total", call) == 1)
