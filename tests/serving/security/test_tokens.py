from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from beamline.serving.cli import main
from beamline.serving.commands import token as command
from beamline.serving.errors import BeamlineError, Forbidden, Unauthenticated
from beamline.serving.security.access import Access, Scope, scope_of
from beamline.serving.security.tokens import TokenFile, new_token, read_tokens


def write(path: Path, *entries: tuple[str, tuple[Scope, ...], datetime | None]) -> list[str]:
    """The tokens themselves, in order."""
    made = [new_token(*entry) for entry in entries]
    path.write_text("\n".join(entry for _, entry in made))
    return [token for token, _ in made]


def test_a_token_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    reader, admin = write(path, ("reader", (Scope.INFER,), None), ("boss", (Scope.ADMIN,), None))
    assert reader not in path.read_text()
    assert hashlib.sha256(reader.encode()).hexdigest() in path.read_text()
    tokens = TokenFile(path)
    assert tokens.client_of(reader).name == "reader"
    assert not tokens.client_of(reader).may(Scope.ADMIN)
    assert tokens.client_of(admin).may(Scope.INFER)


@pytest.mark.parametrize("wrong", ["", "bl_", "ü", "\ud800", "x" * 10_000])
def test_other_tokens_are_refused(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "tokens.toml"
    write(path, ("reader", (Scope.INFER,), None))
    with pytest.raises(Unauthenticated):
        TokenFile(path).client_of(wrong)


def test_a_token_expires(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    (token,) = write(path, ("guest", (Scope.INFER,), datetime(2030, 1, 1, tzinfo=UTC)))
    now = [datetime(2029, 12, 31, tzinfo=UTC).timestamp()]
    tokens = TokenFile(path, lambda: now[0])
    assert tokens.client_of(token).name == "guest"
    now[0] = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    with pytest.raises(Unauthenticated, match="expired"):
        tokens.client_of(token)


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.toml"
    (old,) = write(path, ("old", (Scope.INFER,), None))
    tokens = TokenFile(path)
    path.write_text("[[token]]\nname = 3\n")
    assert tokens.client_of(old).name == "old"
    assert tokens.client_of(old).name == "old"
    assert len([record for record in caplog.records if "tokens.toml" in record.getMessage()]) == 1
    replacement = tmp_path / "new.toml"
    (new,) = write(replacement, ("new", (Scope.INFER,), None))
    os.replace(replacement, path)
    assert tokens.client_of(new).name == "new"
    with pytest.raises(Unauthenticated):
        tokens.client_of(old)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("nonsense", "no TOML"),
        ('[[token]]\nname = "a"\nsha256 = "12"\nscopes = ["infer"]', "sha256"),
        (f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = ["root"]', "scopes"),
        (f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = []', "scopes"),
        (f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = ["infer"]\nexpire = 3', "expire"),
        (f'[[token]]\nname = "a"\nsha256 = "{"0" * 64}"\nscopes = ["infer"]\n' * 2, "twice"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(content)
    with pytest.raises(BeamlineError, match=sentence) as caught:
        read_tokens(path)
    assert "0000" not in str(caught.value)


def test_what_is_not_listed_needs_the_strongest_scope(tmp_path: Path) -> None:
    assert scope_of("/grpc.health.v1.Health/Check") is None
    assert scope_of("/beamline.v1.Inference/Translate") is Scope.INFER
    assert scope_of("/inference.GRPCInferenceService/ModelInfer") is Scope.INFER
    assert scope_of("/inference.GRPCInferenceService/RepositoryModelLoad") is Scope.ADMIN
    assert scope_of("/some.new.Service/Anything") is Scope.ADMIN
    assert scope_of("nonsense") is Scope.ADMIN
    path = tmp_path / "tokens.toml"
    (reader,) = write(path, ("reader", (Scope.INFER,), None))
    with pytest.raises(Forbidden, match="admin"):
        Access(TokenFile(path).client_of).check(Scope.ADMIN, f"Bearer {reader}")
    assert Access(TokenFile(path).client_of).check(Scope.INFER, f"bearer  {reader}").name == "reader"
    assert Access(None).check(Scope.ADMIN, None).may(Scope.ADMIN)


def test_the_command_makes_tokens_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.toml"
    commands = {"token": lambda: command}
    assert main(["token", "ci", "--file", str(path), "--days", "30"], commands) == 0
    first = capsys.readouterr().out.strip()
    assert main(["token", "ops", "--file", str(path), "--scope", "admin"], commands) == 0
    second = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o077 == 0
    tokens = TokenFile(path)
    assert tokens.client_of(first).name == "ci"
    assert tokens.client_of(second).may(Scope.ADMIN)
    assert read_tokens(path)[0].expires is not None
    assert main(["token", "ci", "--file", str(path)], commands) == 2
    assert "already" in capsys.readouterr().err
    assert main(["token", 'a"b', "--file", str(path)], commands) == 2
