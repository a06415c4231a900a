"""Whose call it is reaches the engine: what it remembers of prompts is kept apart by it."""

from __future__ import annotations

from pathlib import Path

from beamline.protos import beamline_pb2 as pb
from beamline.serving.security.access import Scope
from beamline.serving.security.tokens import new_token
from tests.serving.doubles import EngineDouble, connected, running

ONE = pb.TranslateRequest(inputs=[pb.Input(text="a")])


async def test_holders_of_tokens_are_tenants(tmp_path: Path) -> None:
    path, engine = tmp_path / "tokens.toml", EngineDouble()
    made = [new_token(name, (Scope.INFER,), None) for name in ("a", "b")]
    path.write_text("\n".join(entry for _, entry in made))
    async with running(engine, tokens=path) as server, connected(server) as stub:
        for token, _ in made:
            await stub.Translate(ONE, metadata=(("authorization", f"Bearer {token}"),))
    assert [request.tenant for request in engine.submitted] == ["token:a", "token:b"]


async def test_without_tokens_everyone_is_one_tenant() -> None:
    engine = EngineDouble()
    async with running(engine) as server, connected(server) as stub:
        await stub.Translate(ONE)
    assert [request.tenant for request in engine.submitted] == [""]
