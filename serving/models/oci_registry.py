"""A container registry, by the distribution API of the Open Container Initiative: images and their blobs, with digests.

Nothing but the standard library, so that every installation can read images. Who may read is as in other tools: a
registry asks for a token or a password, and the file that `docker login` or `podman login` wrote has it.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from beamline.serving.errors import ModelError

OCI_SCHEMES = ("oci", "oci+http")  # the second one without TLS

_SECONDS = 60.0  # without a byte
_PIECE = 1 << 20  # bytes
_MOST_OF_A_MANIFEST = 4 << 20  # bytes; what registries must accept
_NAME = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
_REFERENCE = re.compile(
    rf"(?P<scheme>oci|oci\+http)://(?P<host>[^/#@]+)/(?P<name>{_NAME})"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?(?:#(?P<folder>[^#]*))?",
    re.ASCII,
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reference:
    """`oci://HOST/NAME:TAG`, `oci://HOST/NAME@DIGEST`, and behind a `#` a folder in the image."""

    scheme: str
    host: str
    name: str
    tag: str  # or a digest, which never moves
    folder: str = ""

    @staticmethod
    def parse(text: str) -> Reference:
        found = _REFERENCE.fullmatch(text)
        if found is None:
            raise ModelError(f"{text!r} is no image: it must be oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST")
        tag = found["digest"] or found["tag"] or "latest"
        return Reference(found["scheme"], found["host"], found["name"], tag, (found["folder"] or "").strip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}/{self.name}{'@' if ':' in self.tag else ':'}{self.tag}"


class _Record(BaseModel):
    """What others have written: fields that we don't know are theirs."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class Platform(_Record):
    architecture: str
    os: str


class Descriptor(_Record):
    """A blob by its content."""

    media_type: str
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0)
    annotations: dict[str, str] | None = None
    platform: Platform | None = None


class ImageManifest(_Record):
    schema_version: int = 2
    media_type: str = "application/vnd.oci.image.manifest.v1+json"
    config: Descriptor
    layers: tuple[Descriptor, ...]


class ImageIndex(_Record):
    """One image for each of several platforms."""

    manifests: tuple[Descriptor, ...]


_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass(slots=True)
class Registry:
    """One image's name in a registry. Raises `ModelError`."""

    reference: Reference
    _authorization: str | None = field(default=None, init=False)

    def manifest(self, tag: str) -> tuple[bytes, str]:
        """Its content and digest. `tag` may be a digest, which is checked."""
        headers = {"Accept": ", ".join(_MANIFESTS)}
        with self._ask("GET", f"manifests/{tag}", f"the image {self.reference}", headers) as answer:
            content = _all_of(answer, _MOST_OF_A_MANIFEST)
        digest = digest_of(content)
        if ":" in tag and digest != tag:
            raise ModelError(f"{self.reference} is corrupt: the manifest's digest is {digest}, not {tag}")
        return content, digest

    def download(self, blob: Descriptor, target: Path) -> None:
        what = f"the blob {blob.digest} of {self.reference}"
        size, sha256 = 0, hashlib.sha256()
        with self._ask("GET", f"blobs/{blob.digest}", what) as answer, target.open("wb") as file:
            try:
                while piece := answer.read(_PIECE):
                    size += len(piece)
                    if size > blob.size:
                        raise ModelError(f"{what} is longer than the {blob.size} bytes that its image says")
                    sha256.update(piece)
                    file.write(piece)
            except http.client.HTTPException as error:
                raise ModelError(f"{what} broke off after {size} of {blob.size} bytes ({error})") from error
        if size < blob.size:
            raise ModelError(f"{what} broke off after {size} of {blob.size} bytes")
        if f"sha256:{sha256.hexdigest()}" != blob.digest:
            raise ModelError(f"{what} is corrupt: its content has another digest")

    def has(self, blob: Descriptor) -> bool:
        try:
            self._ask("HEAD", f"blobs/{blob.digest}", "").close()
        except _Missing:
            return False
        return True

    def upload(self, blob: Descriptor, content: IO[bytes]) -> None:
        what = f"a blob of {self.reference}"
        with self._ask("POST", "blobs/uploads/", what, {"Content-Length": "0"}) as begun:
            place = urllib.parse.urljoin(begun.url, begun.headers["Location"])
        place += f"{'&' if '?' in place else '?'}{urllib.parse.urlencode({'digest': blob.digest})}"
        headers = {"Content-Length": str(blob.size), "Content-Type": "application/octet-stream"}
        self._ask("PUT", place, what, headers, content).close()

    def publish(self, manifest: bytes, media_type: str) -> None:
        """From now on the tag is this image."""
        what = f"the image {self.reference}"
        self._ask("PUT", f"manifests/{self.reference.tag}", what, {"Content-Type": media_type}, manifest).close()

    def _ask(
        self,
        method: str,
        path: str,
        what: str,
        headers: Mapping[str, str] | None = None,
        content: bytes | IO[bytes] | None = None,
    ) -> Any:
        """The answer, to be read and closed. `path` may be a whole address, which an answer has given."""
        root = f"{'http' if self.reference.scheme.endswith('http') else 'https'}://{self.reference.host}/"
        url = urllib.parse.urljoin(f"{root}v2/{self.reference.name}/", path)
        for may_ask_again in (True, False):
            if content is not None and not isinstance(content, bytes):
                content.seek(0)
            request = urllib.request.Request(url, content, dict(headers or {}), method=method)
            if self._authorization is not None and url.startswith(root):
                # Not for the store that a registry may send us on to.
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                return urllib.request.urlopen(request, timeout=_SECONDS)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 401 and may_ask_again:
                        self._authorization = self._authorize(error.headers.get("WWW-Authenticate", ""))
                        continue
                    raise self._refusal(error, what) from None
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                raise ModelError(f"the registry {self.reference.host} can't be reached: {reason}") from error
        raise AssertionError("unreachable")

    def _refusal(self, error: urllib.error.HTTPError, what: str) -> ModelError:
        if error.code == 404:
            return _Missing(f"the registry does not have {what}")
        if error.code in (401, 403):
            has = "with its credentials" if _credentials(self.reference.host) else "without credentials"
            return ModelError(f"the registry {self.reference.host} refuses {what} {has}: docker login, or podman login")
        said = ""
        with suppress(ValueError, KeyError, IndexError, TypeError):
            said = f": {json.loads(error.read(_PIECE))['errors'][0]['message']}"
        return ModelError(f"the registry {self.reference.host} answered {error.code} for {what}{said}")

    def _authorize(self, challenge: str) -> str | None:
        """What to send with requests, as the registry wants it."""
        credentials = _credentials(self.reference.host)
        basic = None if credentials is None else f"Basic {credentials}"
        kind, _, rest = challenge.partition(" ")
        if kind.lower() != "bearer":
            return basic
        asked = dict(_CHALLENGE.findall(rest))
        realm = asked.pop("realm", "")
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(asked)}")
        if basic is not None:
            request.add_unredirected_header("Authorization", basic)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                found = json.loads(_all_of(answer, _PIECE))
            return f"Bearer {found.get('token') or found['access_token']}"
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            raise ModelError(f"{self.reference.host} wants a token, and {realm!r} gives none: {error}") from error


class _Missing(ModelError):
    pass


def _all_of(answer: IO[bytes], most: int) -> bytes:
    content = answer.read(most + 1)
    if len(content) > most:
        raise ModelError(f"the registry's answer is longer than {most} bytes")
    return content


def _credentials(host: str) -> str | None:
    """User and password, encoded as they are sent. Helper programs that keep them elsewhere are not asked."""
    home, run = Path.home(), os.environ.get("XDG_RUNTIME_DIR")
    places = [Path(named)] if (named := os.environ.get("REGISTRY_AUTH_FILE")) else []
    places += [Path(run) / "containers" / "auth.json"] if run else []
    places += [Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"]
    for place in places:
        try:
            entry = json.loads(place.read_text(encoding="utf-8")).get("auths", {}).get(host)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"the credentials in {place} can't be read: {error}") from error
        if isinstance(entry, dict) and entry.get("auth"):
            return str(entry["auth"])
        if isinstance(entry, dict) and "username" in entry:
            return base64.b64encode(f"{entry['username']}:{entry.get('password', '')}".encode()).decode()
    return None
