"""TLS and mutual TLS for gRPC and HTTP. New certificates on disk are used from the next handshake on."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from beamline.serving.errors import BeamlineError
from beamline.serving.security.reloaded_files import ReloadedFiles


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, a client must show a certificate that it has signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def paths(self) -> list[Path]:
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]


@dataclass(frozen=True, slots=True)
class _Loaded:
    configuration: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext


class ServerTls:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._for_grpc = ReloadedFiles(files.paths(), lambda: _load(files))
        self._for_http = ReloadedFiles(files.paths(), lambda: _load(files))

    def grpc_credentials(self) -> grpc.ServerCredentials:
        def newer() -> grpc.ServerCertificateConfiguration | None:  # called by grpc at every handshake
            loaded, changed = self._for_grpc.get_changed()
            return loaded.configuration if changed else None

        return grpc.dynamic_ssl_server_credentials(
            self._for_grpc.get().configuration,
            cast(Callable[[], grpc.ServerCertificateConfiguration], newer),  # None: unchanged
            require_client_authentication=self._files.client_ca is not None,
        )

    def http_context(self) -> ssl.SSLContext:
        first = _load(self._files).context

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._for_http.get().context

        first.sni_callback = choose  # called without a server name, too
        return first


def _load(files: TlsFiles) -> _Loaded:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        roots = files.client_ca.read_bytes() if files.client_ca else None
        context.load_cert_chain(files.certificate, files.key)  # fails where the two don't belong together
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        names = ", ".join(map(str, files.paths()))
        raise BeamlineError(f"these are no PEM files that belong together: {names} ({error.reason})") from error
    except OSError as error:
        raise BeamlineError(f"a TLS file can't be read: {error.filename}: {error.strerror}") from error
    return _Loaded(grpc.ssl_server_certificate_configuration([pair], root_certificates=roots), context)
