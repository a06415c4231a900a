"""The studio: the page at `/`, the description's page at `/docs`, and their files, built from studio/ and packaged.

A page may run its own files and ask its own server, and nothing else; nothing is inline.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a browser asks every time; the tag saves the bytes
    "vary": "accept-encoding",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
FILES = ("app.js", "app.css", "docs.js", "docs.css", "icon.svg", "licences.txt")


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    compressed: bytes
    tag: str
    content_type: str


@cache
def page_file(name: str) -> _File:
    """Read and compressed when it is first asked for."""
    content = resources.files("beamline.serving.api.http").joinpath("studio", name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return _File(content, gzip.compress(content, 9, mtime=0), tag, _TYPES[name.rsplit(".", 1)[1]])


def routes() -> list[Route]:
    return [
        Route("/", _shows("index.html")),
        Route("/docs", _shows("docs.html")),
        *(Route(f"/studio/{name}", _shows(name)) for name in FILES),
    ]


def _shows(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        file = page_file(name)
        headers = {**_HEADERS, "etag": file.tag, "content-type": file.content_type}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(file.content, headers=headers)

    return show
