"""TLS through real handshakes: trusted, mutual, and with certificates that change on disk."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import grpc
import pytest
import trustme

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.errors import BeamlineError
from beamline.serving.security.tls import ServerTls, TlsFiles
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, running

ONE = pb.TranslateRequest(inputs=[pb.Input(text="a")])


def write(folder: Path, certificate: trustme.LeafCert) -> TlsFiles:
    """Each file replaced at once, as a careful operator does."""
    files = TlsFiles(folder / "server.pem", folder / "server.key")
    for path, data in (
        (files.certificate, b"".join(blob.bytes() for blob in certificate.cert_chain_pems)),
        (files.key, certificate.private_key_pem.bytes()),
    ):
        path.with_suffix(".new").write_bytes(data)
        os.replace(path.with_suffix(".new"), path)
    return files


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def port_of(server: Server) -> int:
    return int(server.grpc_address.rpartition(":")[2])


async def translate(server: Server, credentials: grpc.ChannelCredentials) -> str:
    async with grpc.aio.secure_channel(f"localhost:{port_of(server)}", credentials) as channel:
        answer = await beamline_pb2_grpc.InferenceStub(channel).Translate(ONE, timeout=60)
    text: str = answer.translations[0].hypotheses[0].text
    return text


def serial_of(server: Server, authority: trustme.CA) -> str:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("localhost", port_of(server)), 20) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        certificate = secure.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


async def test_who_trusts_the_authority_is_answered_and_nobody_else(tmp_path: Path, authority: trustme.CA) -> None:
    files = write(tmp_path, authority.issue_cert("localhost"))
    async with running(EngineDouble(), tls=files, host="localhost") as server:
        assert await translate(server, grpc.ssl_channel_credentials(authority.cert_pem.bytes())) == "a"
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await translate(server, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes()))
        async with grpc.aio.insecure_channel(f"localhost:{port_of(server)}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as plain:
                await beamline_pb2_grpc.InferenceStub(channel).Translate(ONE, timeout=60)
    assert stranger.value.code() is grpc.StatusCode.UNAVAILABLE
    assert plain.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_wants_a_certificate_of_the_right_authority(tmp_path: Path, authority: trustme.CA) -> None:
    files = write(tmp_path, authority.issue_cert("localhost"))
    clients = trustme.CA()
    (tmp_path / "clients.pem").write_bytes(clients.cert_pem.bytes())
    mutual = TlsFiles(files.certificate, files.key, tmp_path / "clients.pem")

    def credentials(certificate: trustme.LeafCert | None) -> grpc.ChannelCredentials:
        if certificate is None:
            return grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        return grpc.ssl_channel_credentials(
            authority.cert_pem.bytes(),
            certificate.private_key_pem.bytes(),
            certificate.cert_chain_pems[0].bytes(),
        )

    async with running(EngineDouble(), tls=mutual, host="localhost") as server:
        assert await translate(server, credentials(clients.issue_cert("worker"))) == "a"
        for wrong in (None, trustme.CA().issue_cert("worker")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await translate(server, credentials(wrong))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_swapped_certificates_are_used_and_running_calls_go_on(tmp_path: Path, authority: trustme.CA) -> None:
    files = write(tmp_path, authority.issue_cert("localhost"))
    trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    engine = EngineDouble(held=True)
    async with running(engine, tls=files, host="localhost") as server:
        inside = asyncio.ensure_future(translate(server, trusted))
        await engine.until(lambda: len(engine.submitted) == 1)
        first = await asyncio.to_thread(serial_of, server, authority)
        assert await asyncio.to_thread(serial_of, server, authority) == first
        # Half of a swap, or nonsense, changes nothing.
        old_key = files.key.read_bytes()
        write(tmp_path, authority.issue_cert("localhost"))
        new_key = files.key.read_bytes()
        files.key.write_bytes(old_key)
        assert await asyncio.to_thread(serial_of, server, authority) == first
        files.key.write_bytes(b"nonsense")
        assert await asyncio.to_thread(serial_of, server, authority) == first
        files.key.write_bytes(new_key)
        assert await asyncio.to_thread(serial_of, server, authority) != first
        engine.release()
        assert await inside == "a"


def test_broken_files_are_an_error_at_the_start(tmp_path: Path, authority: trustme.CA) -> None:
    files = write(tmp_path, authority.issue_cert("localhost"))
    files.key.write_bytes(authority.issue_cert("other").private_key_pem.bytes())
    with pytest.raises(BeamlineError, match="belong together"):
        ServerTls(files)
    files.key.unlink()
    with pytest.raises(BeamlineError, match=r"server.key"):
        ServerTls(files)
