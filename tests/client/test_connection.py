"""Where a client finds its server, and what it shows there: target, TLS, certificate, token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from beamline import AsyncClient, Client
from beamline._channel import DEFAULT_TARGET, Connection, target_of
from beamline._failures import _unreached
from beamline.errors import (
    BeamlineError,
    Misconnected,
    Unauthenticated,
    Unavailable,
)
from beamline.serving.security.access import Scope
from beamline.serving.security.tls import TlsFiles
from beamline.serving.security.tokens import new_token
from beamline.serving.server import Server
from tests.client.callers import texts
from tests.client.conftest import MakeCaller
from tests.serving.doubles import EngineDouble, running
from tests.support.processes import ROOT, environment


class TestTarget:
    def test_the_argument_then_the_environment_then_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("BEAMLINE_TARGET", raising=False)
        assert target_of(None) == DEFAULT_TARGET == "127.0.0.1:8001"
        monkeypatch.setenv("BEAMLINE_TARGET", "there:1")
        assert target_of(None) == "there:1"
        assert target_of("here:2") == "here:2"

    @pytest.mark.parametrize("wrong", ["localhost", "http://localhost:8001", "https://localhost:8001"])
    def test_what_is_no_target_is_named(self, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BeamlineError, match=r"target is .*HOST:PORT"):
            Client(wrong)
        monkeypatch.setenv("BEAMLINE_TARGET", wrong)
        with pytest.raises(BeamlineError, match=r"BEAMLINE_TARGET is .*HOST:PORT"):
            AsyncClient()

    @pytest.mark.parametrize("wrong", ["localhost:x", "localhost:99999", "localhost:"])
    def test_a_port_is_a_number(self, wrong: str) -> None:
        with pytest.raises(BeamlineError, match="its port must be a number from 1 to 65535"):
            Client(wrong)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"client_cert": "x", "client_key": "y"}, "need tls as well"),
            ({"tls": True, "client_cert": "x"}, "belong together"),
            ({"tls": "no-such-file"}, "no-such-file can't be read"),
            ({"token": "two\nlines"}, "token must be printable"),
            ({"timeout": -1}, "timeout is -1"),
            ({"retries": -1}, "retries is -1"),
        ],
    )
    def test_wrong_settings_are_named(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(BeamlineError, match=sentence):
            Client("localhost:1", **options)


def write(path: Path, certificate: trustme.LeafCert) -> tuple[Path, Path]:
    chain, key = path.with_suffix(".pem"), path.with_suffix(".key")
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return chain, key


@asynccontextmanager
async def far_away(server: Server, seconds: float) -> AsyncIterator[str]:
    """Its target where all that it says takes so long to arrive."""
    host, port = server.grpc_address.rsplit(":", 1)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        while data := await reader.read(65_536):
            await asyncio.sleep(seconds)
            writer.write(data)
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, to_server, 0), carry(from_server, writer, seconds))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as proxy:
        yield "{}:{}".format(*proxy.sockets[0].getsockname())


async def test_a_server_may_be_far_away(caller: MakeCaller) -> None:
    async with running(EngineDouble()) as server, far_away(server, 0.3) as target:
        client = caller(target, retries=0)
        assert (await client("translate", "a")).text == "a"
        await client.close()  # before what is between them


class TestCredentials:
    async def test_tls_certificate_and_token(self, caller: MakeCaller, tmp_path: Path) -> None:
        authority = trustme.CA()
        ca = tmp_path / "ca.pem"
        ca.write_bytes(authority.cert_pem.bytes())
        chain, key = write(tmp_path / "client", authority.issue_cert("me"))
        tls = TlsFiles(*write(tmp_path / "server", authority.issue_cert("localhost")), ca)
        token, entry = new_token("me", (Scope.INFER,), None)
        (tmp_path / "tokens.toml").write_text(entry)
        async with running(EngineDouble(), host="localhost", tls=tls, tokens=tmp_path / "tokens.toml") as server:
            options: dict[str, Any] = {"tls": ca, "client_cert": chain, "client_key": str(key), "retries": 0}
            client = caller(local(server), token=token, **options)
            assert (await client("translate", "a")).text == "a"
            assert texts(await client.pieces("translate_stream", "a")) == ["a"]
            with pytest.raises(Unauthenticated, match=r"wants a bearer token.*here: token="):
                await caller(local(server), **options)("translate", "a")
            with pytest.raises(Unavailable, match="give client_cert and client_key"):
                await caller(local(server), tls=ca, token=token, retries=0)("translate", "a")

    def test_a_key_of_another_certificate_is_said_before_anything_is_sent(self, tmp_path: Path) -> None:
        authority = trustme.CA()
        ca = tmp_path / "ca.pem"
        ca.write_bytes(authority.cert_pem.bytes())
        chain, key = write(tmp_path / "me", authority.issue_cert("me"))
        _, other = write(tmp_path / "other", authority.issue_cert("other"))
        with pytest.raises(BeamlineError, match=r"other\.key is not the private key of the certificate .*me\.pem"):
            Client("localhost:1", tls=ca, client_cert=chain, client_key=other)
        with pytest.raises(BeamlineError, match="must be a certificate and its private key, both PEM"):
            Client("localhost:1", tls=ca, client_cert=key, client_key=chain)
        with pytest.raises(BeamlineError, match=r"me\.key holds no certificate: tls \(--tls-ca\) takes a PEM file"):
            Client("localhost:1", tls=key)
        Client("localhost:1", tls=ca, client_cert=chain, client_key=key).close()

    def test_grpc_writes_no_lines_of_its_own(self, tmp_path: Path) -> None:
        ca = tmp_path / "ca.pem"
        ca.write_bytes(trustme.CA().cert_pem.bytes())
        code = (
            "import sys; from beamline import Client, BeamlineError\n"
            "try: Client('localhost:1', tls=sys.argv[1], retries=0).translate('a')\n"
            "except BeamlineError as error: print(error)"
        )
        clean = {name: value for name, value in environment().items() if name != "GRPC_VERBOSITY"}
        command = [sys.executable, "-c", code, str(ca)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout
        assert done.stderr == ""

    async def test_what_does_not_fit_is_said(self, caller: MakeCaller, tmp_path: Path) -> None:
        authority = trustme.CA()
        ca, stranger = tmp_path / "ca.pem", tmp_path / "stranger.pem"
        ca.write_bytes(authority.cert_pem.bytes())
        stranger.write_bytes(trustme.CA().cert_pem.bytes())
        files = TlsFiles(*write(tmp_path / "server", authority.issue_cert("localhost")))
        async with running(EngineDouble(), host="localhost", tls=files) as server:
            target = local(server)
            with pytest.raises(Unavailable, match="if it wants TLS, give tls"):
                await caller(target, retries=0)("models")
            port = target.rpartition(":")[2]
            last = f"failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:{port}: Connection refused"
            told = _unreached(last, Connection(target))  # the server is at the other address of that name
            assert str(told).startswith(f"the server at {target} can't be talked to: if it wants TLS, give tls")
            with pytest.raises(Misconnected, match="not of an authority that is trusted"):
                await caller(target, tls=str(stranger))("models")
            with pytest.raises(Misconnected, match="for another name than the target's"):
                await caller(target.replace("localhost", "127.0.0.1"), tls=ca)("models")
        async with running(EngineDouble(), host="localhost") as server:
            with pytest.raises(Misconnected, match=r"does not talk TLS: leave tls \(--tls, --tls-ca\) away"):
                await caller(local(server), tls=ca)("models")

    async def test_nothing_but_the_exception_is_said(self, tmp_path: Path) -> None:
        """gRPC's library writes lines of its own about handshakes that fail, unless it is kept from it."""
        authority = trustme.CA()
        (tmp_path / "ca.pem").write_bytes(trustme.CA().cert_pem.bytes())
        files = TlsFiles(*write(tmp_path / "server", authority.issue_cert("localhost")))
        code = (
            "import sys\nfrom beamline import Client, BeamlineError\n"
            "try:\n    Client(sys.argv[1], tls=sys.argv[2]).models()\n"
            "except BeamlineError as error:\n    print(error)\n"
        )
        async with running(EngineDouble(), host="localhost", tls=files) as server:
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", code, local(server), str(tmp_path / "ca.pem")],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                check=True,
            )
        assert "not of an authority that is trusted" in done.stdout
        assert done.stderr == ""


def local(server: Server) -> str:
    return f"localhost:{server.grpc_address.rpartition(':')[2]}"
