"""Container registries: a small one of our own, which can misbehave, and Debian's `docker-registry`."""

from __future__ import annotations

import base64
import http.server
import json
import shutil
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from beamline.serving.models.oci_registry import digest_of
from tests.support.envoy import free_ports
from tests.support.processes import eventually

USER, PASSWORD = "reader", "secret"
HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a"  # of the password above


class Registry(Protocol):
    @property
    def host(self) -> str: ...

    def harm(self, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        """Changes a blob where it lies; None deletes it."""


@dataclass
class SmallRegistry:
    """In this process. What it is asked, and how it misbehaves, is the test's to see and to set."""

    wants_token: bool = False
    redirects: bool = False  # blobs lie elsewhere, as with most large registries
    breaks_off: str = ""  # the digest of a blob of which half is sent
    requests: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    leaked: list[str] = field(default_factory=list)  # credentials that were sent elsewhere

    def __enter__(self) -> SmallRegistry:
        handler = type("Handler", (_Handler,), {"registry": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def harm(self, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        changed = change(self.blobs.pop(digest))
        if changed is not None:
            self.blobs[digest] = changed


class _Handler(http.server.BaseHTTPRequestHandler):
    registry: SmallRegistry
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        registry = self.registry
        registry.requests.append(f"{self.command} {self.path}")
        parts = urllib.parse.urlsplit(self.path).path.split("/")
        if self.path.startswith("/token"):
            wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            if self.headers["Authorization"] != f"Basic {wanted}":
                return self._answer(401)
            return self._answer(200, json.dumps({"token": "allowed"}).encode())
        if self.path.startswith("/elsewhere/"):
            registry.leaked += [self.headers["Authorization"]] if self.headers["Authorization"] else []
            return self._send_blob(parts[-1])
        if not self._allowed():
            return None
        if parts[-2] == "manifests":
            kind, content = registry.manifests.get(parts[-1], ("", b""))
            return self._answer(200, content, {"Content-Type": kind}) if kind else self._answer(404)
        if registry.redirects and self.command == "GET":
            return self._answer(307, headers={"Location": f"/elsewhere/{parts[-1]}"})
        return self._send_blob(parts[-1])

    def do_POST(self) -> None:
        if self._allowed():
            self._answer(202, headers={"Location": f"{self.path}1?state=begun"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._allowed():
            return
        address = urllib.parse.urlsplit(self.path)
        if "/manifests/" in address.path:
            stored = self.headers["Content-Type"], content
            self.registry.manifests |= {address.path.rpartition("/")[2]: stored, digest_of(content): stored}
        else:
            asked = urllib.parse.parse_qs(address.query)
            assert asked == {"state": ["begun"], "digest": [digest_of(content)]}
            self.registry.blobs[digest_of(content)] = content
        self._answer(201)

    def _allowed(self) -> bool:
        if self.registry.wants_token and self.headers["Authorization"] != "Bearer allowed":
            realm = f'Bearer realm="http://{self.registry.host}/token",service="here",scope="repository:models:pull"'
            self._answer(401, headers={"WWW-Authenticate": realm})
            return False
        return True

    def _send_blob(self, digest: str) -> None:
        content = self.registry.blobs.get(digest)
        if content is None:
            return self._answer(404)
        if digest == self.registry.breaks_off and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return None
        return self._answer(200, content)

    def _answer(self, code: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@dataclass(frozen=True)
class DebianRegistry:
    host: str
    folder: Path

    def harm(self, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        data = self.place(digest)
        changed = change(data.read_bytes())
        if changed is None:
            data.unlink()
        else:
            data.write_bytes(changed)

    def place(self, digest: str) -> Path:
        """Where it keeps a blob."""
        algorithm, _, number = digest.partition(":")
        return self.folder / "docker" / "registry" / "v2" / "blobs" / algorithm / number[:2] / number / "data"


@contextmanager
def docker_registry(folder: Path, **settings: dict[str, Any]) -> Iterator[DebianRegistry]:
    """`settings`: sections of its configuration, beside those that are always there."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not here: apt-get install docker-registry")
    [port] = free_ports(1)
    host = f"127.0.0.1:{port}"
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        **settings,
        "http": {"addr": host, **settings.get("http", {})},
    }
    file = folder / "registry.yml"
    file.write_text(yaml.safe_dump(config))
    command = [program, "serve", str(file)]
    with (folder / "registry.log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            eventually(lambda: _accepts(port), "the registry answers")
            yield DebianRegistry(host, folder / "registry")
        finally:
            process.terminate()


def _accepts(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
