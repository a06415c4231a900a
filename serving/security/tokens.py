"""Bearer tokens: a TOML file of names, scopes and hashes. The server never stores a token itself.

    [[token]]
    name = "ci"
    sha256 = "9f86d081..."             # of the token; 256 random bits need no salt and no slow hash
    scopes = ["infer"]                 # or "admin", which may do everything
    expires = 2027-01-01T00:00:00Z     # optional

`beamline token NAME --file FILE` makes one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from beamline.serving.contract.validation import sentence_of
from beamline.serving.errors import BeamlineError, Unauthenticated
from beamline.serving.security.access import Client, Scope
from beamline.serving.security.reloaded_files import ReloadedFiles


class WrongToken(Unauthenticated):
    """One was sent, and it is not known here, or not any more."""

    def __init__(self, sentence: str, digest: str) -> None:
        super().__init__(sentence)
        self.digest = digest


class TokenEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    expires: AwareDatetime | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    token: tuple[TokenEntry, ...] = ()


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    try:
        entries = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).token
    except OSError as error:
        raise BeamlineError(f"the token file {path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BeamlineError(f"the token file {path} is no TOML: {error}") from error
    except ValidationError as error:
        raise BeamlineError(f"the token file {path} is wrong: {sentence_of(error)}") from None
    names = [entry.name for entry in entries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BeamlineError(f"the token file {path} has the name {min(twice)!r} twice")
    return entries


class TokenFile:
    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._entries = ReloadedFiles([path], lambda: read_tokens(path))
        self._now = now

    def client_of(self, token: str) -> Client:
        """Compares with every entry, each in constant time: how long it takes says nothing about any of them."""
        digest = _hash(token)
        found: TokenEntry | None = None
        for entry in self._entries.get():
            if hmac.compare_digest(digest, entry.sha256):
                found = entry
        if found is None:
            raise WrongToken("the bearer token is not known here", digest)
        if found.expires is not None and found.expires.timestamp() <= self._now():
            raise WrongToken("the bearer token has expired", digest)
        return Client(found.name, frozenset(found.scopes))


def new_token(name: str, scopes: tuple[Scope, ...], expires: datetime | None) -> tuple[str, str]:
    """A token, and its entry for the file."""
    token = f"bl_{secrets.token_urlsafe(32)}"
    lines = [
        "[[token]]",
        f'name = "{name}"',
        f'sha256 = "{_hash(token)}"',
        "scopes = [" + ", ".join(f'"{scope}"' for scope in scopes) + "]",
    ]
    if expires is not None:
        lines.append(f"expires = {expires.astimezone(UTC).isoformat(timespec='seconds')}")
    return token, "\n".join(lines) + "\n"


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
