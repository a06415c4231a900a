from __future__ import annotations

import logging
import secrets
from pathlib import Path

import grpc
import httpx2 as httpx
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.errors import Overloaded, Unauthenticated
from beamline.serving.security import attempts
from beamline.serving.security.access import Client, Scope
from beamline.serving.security.attempts import TokenAttempts
from beamline.serving.security.tokens import WrongToken, new_token
from tests.serving.doubles import EngineDouble, connected, running

MOST = attempts._MOST


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def guess(tried: TokenAttempts, address: str = "a") -> None:
    with pytest.raises(WrongToken):
        tried.settle(WrongToken("wrong", secrets.token_hex()), address)


def test_who_guesses_too_often_is_not_told_any_more() -> None:
    clock = Clock()
    tried = TokenAttempts(clock)
    for _ in range(MOST):
        guess(tried)
    right, wrong = Client("right"), WrongToken("wrong", "another")
    for outcome in (right, wrong):  # the same for both, so it says nothing
        with pytest.raises(Overloaded) as caught:
            tried.settle(outcome, "a")
        assert caught.value.retry_after == 60
    assert tried.settle(right, "b") is right
    clock.now = 59.5
    assert tried.settle(right, "a") is right  # it has been accepted, at another address
    with pytest.raises(Overloaded):
        tried.settle(Client("other"), "a")
    clock.now = 60
    assert tried.settle(Client("other"), "a").name == "other"
    guess(tried)


def test_a_wrong_token_that_is_sent_again_is_no_second_guess() -> None:
    tried = TokenAttempts(Clock())
    for _ in range(3 * MOST):
        with pytest.raises(WrongToken):
            tried.settle(WrongToken("expired", "the same"), "a")
    assert tried.settle(Client("x"), "a").name == "x"


def test_a_call_without_a_token_is_no_guess() -> None:
    tried = TokenAttempts(Clock())
    for _ in range(3 * MOST):
        with pytest.raises(Unauthenticated):
            tried.settle(Unauthenticated("none"), "a")
    assert tried.settle(Client("x"), "a").name == "x"


def test_servers_without_tokens_and_health_checks_know_no_limit() -> None:
    tried = TokenAttempts(Clock())
    for _ in range(MOST):
        guess(tried)
    assert tried.settle(Client(), "a").name is None


def test_addresses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_MOST_ADDRESSES", 10)
    tried = TokenAttempts(Clock())
    for number in range(100):
        guess(tried, str(number))
    assert len(tried._wrong) == 10


async def test_wrong_tokens_are_logged_with_the_address_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_MOST", 2)
    token, entry = new_token("ci", (Scope.INFER,), None)
    (tmp_path / "tokens.toml").write_text(entry)
    one = pb.TranslateRequest(inputs=[pb.Input(text="a")])
    async with (
        running(EngineDouble(), tokens=tmp_path / "tokens.toml", http_port=0) as server,
        connected(server) as stub,
        httpx.AsyncClient() as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(one, metadata=(("authorization", "Bearer bl_wrong"),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        url = f"http://{server.http_address}/v1/models"
        codes = [
            (await client.get(url, headers={"authorization": f"Bearer {number}"})).status_code for number in (1, 2)
        ]
        assert codes == [401, 429]  # one address, whichever the API
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(one, metadata=(("authorization", f"Bearer {token}"),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        sample = server.metrics.registry.get_sample_value
        assert sample("beamline_refused_total", {"reason": "unauthenticated"}) == 2
        assert sample("beamline_refused_total", {"reason": "overloaded"}) == 2
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines.count("a wrong token came from ipv4:127.0.0.1") == 2
