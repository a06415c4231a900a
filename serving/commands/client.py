"""A small synchronous client: many lines in flight, answers in order; and what a language model says, as it comes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Semaphore
from types import TracebackType
from typing import Any

import grpc

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.commands.call_errors import sentence_of
from beamline.serving.errors import BeamlineError

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

_WINDOWS_AHEAD = 8  # answers that are kept until their turn
FILE_WINDOW, FILE_BLOCK = 64, 256  # of a file: what fills a server's slots, and can be sorted and still be seen to move

Question = Callable[[str], pb.TranslateRequest]


class CallFailed(BeamlineError):
    """A call that got no answer; the text is for people."""


_OWN_FAULT = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)  # the next line may well be answered


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a server may want to see. Nothing set: no encryption, no token."""

    tls_ca: Path | None = None  # whose certificates we trust
    tls_cert: Path | None = None  # ours, where the server wants one
    tls_key: Path | None = None
    token_file: Path | None = None  # the token is its only content

    @property
    def tls(self) -> bool:
        return self.tls_ca is not None

    def channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        if self.tls_ca is None:
            if self.tls_cert is not None or self.tls_key is not None:
                raise BeamlineError("--tls-cert and --tls-key need --tls-ca as well")
            return grpc.insecure_channel(target, options=options)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BeamlineError("--tls-cert and --tls-key belong together: give both")
        own = [None if path is None else _read(path) for path in (self.tls_key, self.tls_cert)]
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(_read(self.tls_ca), *own), options=options)

    def metadata(self) -> list[tuple[str, str]]:
        if self.token_file is None:
            return []
        try:
            return [("authorization", f"Bearer {_read(self.token_file).decode('ascii').strip()}")]
        except UnicodeDecodeError:
            raise BeamlineError(f"{self.token_file} holds no token") from None


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BeamlineError(f"{path} can't be read: {error.strerror}") from error
    if not content.strip():  # an empty certificate would end the process inside gRPC
        raise BeamlineError(f"{path} is empty")
    return content


class Client:
    def __init__(
        self, target: str, window: int = 32, credentials: Credentials | None = None, *, block: int = 1
    ) -> None:
        """`window` is how many lines are with the server at once. Of each `block` of lines the longest is sent first:
        neighbours of one length are the least work for a server, and short ones fill its slots at the end."""
        self._target = target
        self._window = window
        self._block = block
        credentials = credentials or Credentials()
        self._tls = credentials.tls
        self._metadata = credentials.metadata()
        self._channel = credentials.channel(
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

    def translate(self, lines: Iterable[str], question: Question) -> Iterator[pb.Translation | CallFailed | None]:
        """One answer per line, in order; None for a blank line, which is not sent, and the refusal where a line itself
        is at fault. Any other failure is raised. `question` makes the request for a line's text."""
        for response in self._in_order(self._stub.Translate, lines, question):
            answered = response is not None and not isinstance(response, CallFailed)
            yield response.translations[0] if answered else response

    def classify(
        self, lines: Iterable[str], question: Callable[[str], pb.ClassifyRequest]
    ) -> Iterator[pb.Classification | None]:
        """The same; here every failure is raised."""
        for response in self._in_order(self._stub.Classify, lines, question):
            yield None if response is None else _raised(response).classifications[0]

    def embed(self, lines: Iterable[str], question: Callable[[str], pb.EmbedRequest]) -> Iterator[pb.Embedding | None]:
        for response in self._in_order(self._stub.Embed, lines, question):
            yield None if response is None else _raised(response).embeddings[0]

    def _in_order(self, method: Any, lines: Iterable[str], question: Callable[[str], Any]) -> Iterator[Any]:
        """While a long line is waited for, those behind it are sent, some windows ahead: the server stays busy."""
        free = Semaphore(self._window)
        most = self._window if self._window == 1 else max(_WINDOWS_AHEAD * self._window, self._block)
        pending: deque[Any] = deque()

        def sent(line: str) -> Any:
            free.acquire()
            call = method.future(question(line), metadata=self._metadata)
            call.add_done_callback(lambda _: free.release())
            return call

        rest = iter(lines)
        while block := list(islice(rest, self._block)):
            calls: list[Any] = [None] * len(block)
            for index in sorted(range(len(block)), key=lambda index: -len(block[index])):
                if block[index].strip():
                    calls[index] = sent(block[index])
            pending.extend(calls)
            while pending and (len(pending) >= most or pending[0] is None or pending[0].done()):
                yield self._answer(pending.popleft())
        while pending:
            yield self._answer(pending.popleft())

    def generate(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateReply]:
        """The pieces of the answers, as they come."""
        try:
            yield from self._stub.Generate(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise CallFailed(self._sentence(error)) from error

    def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        try:
            response: pb.ScoreResponse = self._stub.Score(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise CallFailed(self._sentence(error)) from error
        return response

    def _answer(self, call: Any) -> Any:
        if call is None:
            return None
        try:
            return call.result()
        except grpc.RpcError as error:
            failure = CallFailed(self._sentence(error))
            if error.code() in _OWN_FAULT:
                return failure
            raise failure from error

    def _sentence(self, error: Any) -> str:
        return sentence_of(error, self._target, self._tls).replace("inputs[0]", "the text")


def _raised(response: Any) -> Any:
    if isinstance(response, CallFailed):
        raise response
    return response
