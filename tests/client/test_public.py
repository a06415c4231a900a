"""What users see: light to import, typed, and nothing of protobuf in it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import beamline
from beamline import AsyncClient, Client, errors, types
from beamline.version import beamline_version
from tests.support import async_methods
from tests.support.processes import ROOT, environment

STREAMS = ("translate_stream", "generate_stream", "chat_stream")
METHODS = ("translate", "generate", "chat", "score", "classify", "embed", "models", "close", *STREAMS)
HEAVY = ("grpc", "google.protobuf", "numpy", "onnxruntime", "torch", "pydantic", "asyncio", "beamline.serving")

USER = """
import asyncio
from typing import assert_type

from beamline import AsyncClient, BeamlineError, Client, Features, TokenIds, Translation, __version__
from beamline.errors import InvalidItem, Overloaded
from beamline.types import Classification, Embedding, Generation, GenerationPiece, Message, Model, Score


def wrapped(text: str | TokenIds | Features, beam_size: int | None = None, timeout: float | None = None) -> Translation:
    return Client().translate(text, beam_size=beam_size, timeout=timeout, model=None, target_prefix=None)


def ask(lines: list[str]) -> list[str]:
    with Client("127.0.0.1:8001", token="secret", timeout=5) as client:
        assert_type(client.translate("a"), Translation)
        assert_type(client.translate(lines, beam_size=4, early_stopping="never"), list[Translation])
        assert_type(client.translate(lines, return_errors=True), list[Translation | BeamlineError])
        assert_type(client.generate("a", temperature=0.5, stop=["b"]), Generation)
        assert_type(client.chat([Message("user", "Hi"), {"role": "user", "content": "Hi"}], n=2), Generation)
        assert_type(client.score("a", source="b"), Score)
        assert_type(client.score(lines, source=lines), list[Score])
        assert_type(client.classify(lines, top_k=1), list[Classification])
        assert_type(client.embed("a", pooling="mean"), Embedding)
        assert_type(client.models(), list[Model])
        for piece in client.generate_stream("a"):
            assert_type(piece, GenerationPiece)
        try:
            return [translation.text for translation in client.translate(lines)]
        except InvalidItem as error:
            return [str(error.index)]
        except Overloaded as error:
            return [f"{error.retry_after} {__version__}"]


async def ask_too(lines: list[str]) -> None:
    async with AsyncClient(tls=True) as client:
        assert_type(await client.translate("a"), Translation)
        assert_type(await client.translate(lines, return_errors=True), list[Translation | BeamlineError])
        stream = client.translate_stream("a")
        async for piece in stream:
            print(piece.text)
        await stream.aclose()


asyncio.run(ask_too(ask([])))
"""
WRONG = [
    'Client().translate("a", beam=4)',
    'Client().translate("a", beam_size="4")',
    'Client().embed("a", pooling="median")',
    'Client().translate(["a"]).text',
]


def test_a_users_file_is_typed(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(USER)
    bad.write_text("from beamline import Client\n" + "\n".join(WRONG) + "\n")
    options = [
        "--follow-imports=silent",
        "--no-error-summary",
        "--config-file=",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *options, str(good), str(bad)],
        cwd=tmp_path,
        env={**environment(), "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = {tuple(line.split(":")[:2]) for line in done.stdout.splitlines() if ": error: " in line}
    assert wrong == {("bad.py", str(number)) for number in range(2, 2 + len(WRONG))}, done.stdout + done.stderr


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_a_python_without_what_it_needs_is_told_what_to_do() -> None:
    code = "import sys; sys.modules['grpc'] = None\nfrom beamline import Client"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = f"ModuleNotFoundError: beamline.Client needs grpc, which is not installed for {sys.executable}: call the "
    assert done.stderr.splitlines()[-1].startswith(said)


def test_importing_beamline_is_light() -> None:
    assert imported_by("import beamline; beamline.__all__; dir(beamline)").isdisjoint(HEAVY)
    assert imported_by("from beamline import BeamlineError").isdisjoint(set(HEAVY) - {"beamline.serving"})


def test_the_client_brings_nothing_of_the_server_but_the_errors() -> None:
    loaded = imported_by("from beamline import Client, AsyncClient; Client().close()")
    assert {name for name in loaded if name.startswith("beamline.serving")} == {
        "beamline.serving",
        "beamline.serving.errors",
    }
    assert loaded.isdisjoint({"numpy", "onnxruntime", "torch", "pydantic", "starlette", "tokenizers"})


def test_the_package_has_its_names() -> None:
    assert beamline.__version__ == beamline_version()
    assert beamline.Client is Client
    assert {name for name, value in vars(types).items() if dataclasses.is_dataclass(value)} <= set(beamline.__all__)
    assert set(beamline.__all__) <= set(dir(beamline))
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = beamline.nonesuch  # type: ignore[attr-defined]


def annotated(thing: Any) -> list[Any]:
    found = typing.get_type_hints(thing, include_extras=True).values()
    return [part for annotation in found for part in parts(annotation)]


def parts(annotation: Any) -> list[Any]:
    return [annotation, *(part for argument in typing.get_args(annotation) for part in parts(argument))]


def public_types() -> list[Any]:
    return [value for value in vars(types).values() if isinstance(value, type) and value.__module__ == types.__name__]


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_no_protobuf_in_any_signature(client: type) -> None:
    public = [name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")]
    assert sorted(public) == sorted(METHODS)
    signatures: list[Any] = [client.__init__, *(getattr(client, name) for name in METHODS)]  # type: ignore[misc]
    signatures += [overload for name in METHODS for overload in typing.get_overloads(getattr(client, name))]
    seen = [part for thing in [*signatures, *public_types()] for part in annotated(thing)]
    assert types.Translation in seen
    modules = {getattr(part, "__module__", "") for part in seen if not isinstance(part, ModuleType)}
    assert {name for name in modules if "proto" in name or "grpc" in name} == set()
    assert all(inspect.getdoc(getattr(client, name)) for name in METHODS)


def test_the_awaited_methods_are_made_of_the_others() -> None:
    assert async_methods.RESULT.read_text(encoding="utf-8") == async_methods.made(), "run `make methods`"


def test_both_clients_have_the_same_methods() -> None:
    for name in ["__init__", *METHODS]:
        ours, theirs = (inspect.signature(getattr(client, name)).parameters for client in (Client, AsyncClient))
        assert ours == theirs


def test_answers_are_frozen() -> None:
    for kind in public_types():
        if dataclasses.is_dataclass(kind):
            assert vars(kind)["__dataclass_params__"].frozen


def test_the_errors_are_one_tree() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.BeamlineError)
        assert name in (errors.__doc__ or "")
