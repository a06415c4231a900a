"""A small synchronous client: many lines in flight, answers in order."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import grpc

from protos import beamline_pb2 as pb
from protos import beamline_pb2_grpc
from serving.errors import BeamlineError

# A full queue is no reason to give up: grpc itself tries again, later each time.
_RETRY_WHEN_FULL = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": pb.DESCRIPTOR.services_by_name["Inference"].full_name}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.2s",
                    "maxBackoff": "5s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                },
            }
        ]
    }
)

Question = Callable[[str], pb.TranslateRequest]


class CallFailed(BeamlineError):
    """A call that got no answer; the text is for people."""


class Client:
    def __init__(self, target: str, window: int = 32) -> None:
        """`window` is how many lines are with the server at once."""
        self._target = target
        self._window = window
        self._channel = grpc.insecure_channel(
            target,
            options=[("grpc.service_config", _RETRY_WHEN_FULL), ("grpc.max_receive_message_length", -1)],
        )
        self._stub = beamline_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()  # what is still in flight is cancelled

    def translate(self, lines: Iterable[str], question: Question) -> Iterator[pb.Translation | None]:
        """One answer per line, in order; None for a blank line, which is not sent. `question` makes the
        request for a line's text."""
        pending: deque[Any] = deque()
        for line in lines:
            pending.append(self._stub.Translate.future(question(line)) if line.strip() else None)
            while pending and (len(pending) >= self._window or pending[0] is None or pending[0].done()):
                yield self._answer(pending.popleft())
        while pending:
            yield self._answer(pending.popleft())

    def _answer(self, call: Any) -> pb.Translation | None:
        if call is None:
            return None
        try:
            response: pb.TranslateResponse = call.result()
        except grpc.RpcError as error:
            raise CallFailed(self._sentence(error)) from error
        return response.translations[0]

    def _sentence(self, error: Any) -> str:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAVAILABLE:
            return f"the server at {self._target} is not available: {details}"
        return f"{details} ({code.name})"
