"""Stores of tests, which models are put into as somebody else would."""

from __future__ import annotations

import http.server
import shutil
import ssl
import threading
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from beamline.serving.models.oci_image import Layer, push
from beamline.serving.models.oci_registry import Reference
from tests.support.registries import SmallRegistry


class Store(Protocol):
    url: str

    def put(self, folder: Path) -> None:
        """All of it, and nothing else."""

    def below(self, path: str) -> str:
        """The address of a folder in it."""

    def close(self) -> None: ...


class Folder:
    """A web server over a folder, which lists what is in it."""

    def __init__(self, tmp_path: Path, tls: ssl.SSLContext | None = None) -> None:
        self._folder = tmp_path / "served"
        handler = partial(_Quiet, directory=str(self._folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"

    def put(self, folder: Path) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(folder, self._folder)

    def below(self, path: str) -> str:
        return f"{self.url}/{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Bucket:
    def __init__(self, filesystem: Any, url: str) -> None:
        self._filesystem = filesystem
        self.url = f"{url}/repo"
        self._root = self.url.partition("://")[2]

    def put(self, folder: Path) -> None:
        if self._filesystem.exists(self._root):
            self._filesystem.rm(self._root, recursive=True)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            self._filesystem.pipe_file(f"{self._root}/{path.relative_to(folder)}", path.read_bytes())

    def below(self, path: str) -> str:
        return f"{self.url}/{path}"

    def close(self) -> None:
        pass


class Image:
    """The tag of an image in a registry."""

    def __init__(self, host: str, registry: SmallRegistry | None = None) -> None:
        self.url = f"oci+http://{host}/models:latest"
        self._registry = registry

    def put(self, folder: Path) -> None:
        files = {PurePosixPath(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        push(Reference.parse(self.url), [Layer("everything", files)])

    def below(self, path: str) -> str:
        return f"{self.url}#{path}"

    def close(self) -> None:
        if self._registry is not None:
            self._registry.__exit__()
