"""`beamline translate` at a server that wants TLS, a certificate and a token; and one limit for gRPC and HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
import trustme

from beamline.protos import beamline_pb2 as pb
from beamline.serving.cli import Loader, main
from beamline.serving.commands import models, translate
from beamline.serving.security.access import Scope
from beamline.serving.security.tls import TlsFiles
from beamline.serving.security.tokens import new_token
from beamline.serving.server import Server
from beamline.serving.telemetry.triton_metrics import Triton
from tests.serving.doubles import EngineDouble, connected, eventually, running

COMMANDS: dict[str, Loader] = {"translate": lambda: translate, "models": lambda: models}


def write(path: Path, certificate: trustme.LeafCert) -> tuple[Path, Path]:
    chain, key = path.with_suffix(".pem"), path.with_suffix(".key")
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return chain, key


async def test_the_command_shows_what_the_server_wants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    server_files = write(tmp_path / "server", authority.issue_cert("localhost"))
    client_chain, client_key = write(tmp_path / "client", authority.issue_cert("me"))
    token, entry = new_token("me", (Scope.INFER,), None)
    (tmp_path / "tokens.toml").write_text(entry)
    (tmp_path / "token").write_text(f"{token}\n")
    tls = TlsFiles(*server_files, tmp_path / "ca.pem")
    async with running(EngineDouble(), host="localhost", tls=tls, tokens=tmp_path / "tokens.toml") as server:
        port = server.grpc_address.rpartition(":")[2]
        line = ["translate", "--target", f"localhost:{port}", "--tls-ca", str(tmp_path / "ca.pem")]
        line += ["--tls-cert", str(client_chain), "--tls-key", str(client_key)]
        assert await asyncio.to_thread(main, [*line, "--token-file", str(tmp_path / "token"), "a"], COMMANDS) == 0
        assert capsys.readouterr().out == "a\n"
        assert await asyncio.to_thread(main, [*line, "a"], COMMANDS) == 2
        refused = capsys.readouterr().err
        assert "wants a bearer token" in refused
        assert refused.endswith("(here: token=..., or --token-file)\n")


async def test_the_commands_say_when_only_one_side_talks_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "stranger.pem").write_bytes(trustme.CA().cert_pem.bytes())
    trust, distrust = (["--tls-ca", str(tmp_path / name)] for name in ("ca.pem", "stranger.pem"))
    files = TlsFiles(*write(tmp_path / "server", authority.issue_cert("localhost")))

    async def message_of(server: Server, host: str, *options: str) -> str:
        target = f"{host}:{server.grpc_address.rpartition(':')[2]}"
        for line in (["translate", "a"], ["models"]):
            assert await asyncio.to_thread(main, [*line, "--target", target, *options], COMMANDS) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first == second
        assert first.startswith(f"beamline: the server at {target} can't be talked to: ")
        return first

    async with running(EngineDouble(), host="localhost", tls=files) as server:
        assert (await message_of(server, "localhost")).endswith("if it wants TLS, give tls (--tls, --tls-ca)")
        assert (
            "certificate is not of an authority that is trusted: give its file as tls (--tls-ca)"
            in await message_of(server, "localhost", *distrust)
        )
        assert "certificate is for another name than the target's" in await message_of(server, "127.0.0.1", *trust)
    async with running(EngineDouble(), host="localhost") as server:
        assert (await message_of(server, "localhost", *trust)).endswith(
            "it does not talk TLS: leave tls (--tls, --tls-ca) away"
        )
    async with running(EngineDouble(), host="localhost", tls=replace(files, client_ca=tmp_path / "ca.pem")) as server:
        assert "if it wants to see a certificate, give client_cert and client_key (--tls-cert" in await message_of(
            server, "localhost", *trust
        )


def test_an_empty_certificate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    assert main(["translate", "--tls-ca", str(tmp_path / "empty"), "a"], COMMANDS) == 2
    assert capsys.readouterr().err == f"beamline: {tmp_path}/empty is empty\n"


@pytest.mark.parametrize("given", [["--tls-cert", "x"], ["--tls-ca", "x"], ["--token-file", "x"]])
def test_files_that_are_missing_are_named(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", *given, "a"], COMMANDS) == 2
    assert "x can't be read" in (message := capsys.readouterr().err) or "--tls-ca" in message


async def test_a_client_has_one_limit_for_both_doors() -> None:
    engine = EngineDouble(held=True)
    async with (
        running(engine, http_port=0, max_calls_per_client=1) as server,
        connected(server) as stub,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as http,
    ):
        inside = asyncio.ensure_future(stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")])))
        await engine.until(lambda: len(engine.submitted) == 1)
        assert (await http.post("/v1/translate", json={"inputs": [{"text": "a"}]})).status_code == 429
        engine.release()
        await inside


async def test_tritons_names_count_calls_of_both_doors() -> None:
    async with (
        running(EngineDouble(), http_port=0) as server,
        connected(server) as stub,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as http,
    ):
        await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")] * 3))
        await http.post("/v1/translate", json={"inputs": [{"text": "a"}]})
        await http.post("/v1/translate", json={})
        value = server.metrics.triton.value
        await eventually(lambda: value(Triton.SUCCESS, "fake", "1") == 2)
        await eventually(lambda: value(Triton.FAILURE, "fake", "1") == 1)
