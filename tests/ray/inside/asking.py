"""One call as raw bytes, over gRPC or HTTP: what was answered, for comparing two servers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

PATIENCE = 120.0
_OF_THE_MOMENT = ("timings", "queue_ms", "encode_ms", "decode_ms")  # what no two answers share


@dataclass(frozen=True)
class Answer:
    code: str
    details: str
    messages: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    path: str
    request: Message
    response: type[Message]
    streams: bool = False  # answers
    asks: bool = False  # a stream of requests, too


def ask(address: str, call: Call, metadata: Sequence[tuple[str, str]] = ()) -> Answer:
    with grpc.insecure_channel(address) as channel:
        return ask_over(channel, call, metadata)


def ask_over(channel: grpc.Channel, call: Call, metadata: Sequence[tuple[str, str]] = ()) -> Answer:
    coded: dict[str, Any] = {
        "request_serializer": type(call.request).SerializeToString,
        "response_deserializer": call.response.FromString,
    }
    how: dict[str, Any] = {"timeout": PATIENCE, "metadata": metadata}
    found: list[Any]
    try:
        if call.asks:
            found = list(channel.stream_stream(call.path, **coded)(iter([call.request]), **how))
        elif call.streams:
            found = list(channel.unary_stream(call.path, **coded)(call.request, **how))
        else:
            found = [channel.unary_unary(call.path, **coded)(call.request, **how)]
    except grpc.RpcError as error:
        return Answer(error.code().name, error.details() or "")
    messages = [lasting(MessageToDict(each, preserving_proto_field_name=True)) for each in found]
    return Answer("OK", "", tuple(_joined(messages) if call.streams and not call.asks else messages))


def _joined(pieces: Iterable[dict[str, Any]]) -> list[Any]:
    """How a stream is cut depends on its reader: here all pieces of an answer are one, in the answers' order."""
    answers: dict[int, dict[str, Any]] = {}
    usage = None
    for piece in pieces:
        usage = piece.pop("usage", usage)
        answer = answers.setdefault(piece.pop("index", 0) or piece.pop("input", 0), {"text": "", "tokens": []})
        answer["text"] += piece.pop("text", "")
        answer["tokens"] += piece.pop("tokens", [])
        answer.update(piece)
    return [*(answers[index] for index in sorted(answers)), usage]


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if key not in _OF_THE_MOMENT}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def http_ask(
    address: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str, Any]:
    """Status, kind of content, and content: JSON, the texts of server-sent events together, or text."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        content = None if body is None else json.dumps(body)
        method = "GET" if body is None else "POST"
        connection.request(method, path, content, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        kind = (answer.getheader("content-type") or "").partition(";")[0]
        return answer.status, kind, _content(kind, answer.read().decode())
    finally:
        connection.close()


def _content(kind: str, content: str) -> Any:
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: {")]
        return _joined(lasting(json.loads(each)) for each in events)
    if kind == "application/json":
        found = lasting(json.loads(content))
        if isinstance(found, dict) and "error" in found:
            error = found["error"]
            (error if isinstance(error, dict) else found).pop("request_id", None)
        return found
    return content
