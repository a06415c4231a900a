"""The Python blocks of the documents about the client are run, each by itself."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from tests.serving.doubles import started
from tests.serving.fake_lm import GatedEngine, serving
from tests.support.processes import ROOT, environment

_BLOCK = re.compile(r"(?:<!-- (server|in process|not run): ([^\n]*?) -->\n)?```python\n(.*?)```", re.DOTALL)
_PRINTS = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
_DEFAULT_TARGET = "127.0.0.1:8001"


DOCUMENTS = (
    "README.md",
    "docs/python-client.md",
    "docs/generation.md",
    "docs/in-process.md",
    "docs/from-ctranslate2.md",
)


@dataclass(frozen=True)
class Block:
    file: str
    number: int
    server: str | None  # None: it can't be run here; empty: it needs none
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def blocks() -> list[Block]:
    return [
        Block(file, number, {"not run": None, "in process": ""}.get(kind, what or "en-de"), code)
        for file in DOCUMENTS
        for number, (kind, what, code) in enumerate(_BLOCK.findall((ROOT / file).read_text(encoding="utf-8")))
    ]


BLOCKS = blocks()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.server == "en-de"], ids=str)
async def test_it_runs_and_prints_what_it_says(block: Block) -> None:
    await check(block, served(ROOT / "model_repo", "en-de"))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.server == "a language model"], ids=str)
async def test_so_does_it_with_a_language_model(block: Block) -> None:
    await check(block, serving(GatedEngine()))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.server == "a classifier"], ids=str)
async def test_so_does_it_with_a_classifier(block: Block, pooled_repository: Path) -> None:
    await check(block, served(pooled_repository, "mood"))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.server == ""], ids=str)
async def test_so_does_it_without_a_server(block: Block) -> None:
    await check_output(block, block.code, environment())


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.server is None], ids=str)
def test_what_is_not_run_is_python_at_least(block: Block) -> None:
    compile(block.code, str(block), "exec")


def served(repository: Path, model: str) -> AbstractAsyncContextManager[Server]:
    config = ServeConfig(repository=repository, load=(model,), grpc_port=0, metrics_port=0, threads=1, engines=1)
    return started(Server(config))


async def check(block: Block, started_server: AbstractAsyncContextManager[Server]) -> None:
    async with started_server as server:
        target = server.grpc_address
        variables = {**environment(), "BEAMLINE_TARGET": target}
        await check_output(block, block.code.replace(_DEFAULT_TARGET, target), variables)


async def check_output(block: Block, code: str, variables: Mapping[str, str]) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=dict(variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed = done.stdout.splitlines()
    assert printed
    for line in _PRINTS.findall(block.code):
        assert line in printed


def test_the_documents_have_their_examples() -> None:
    assert [block.file for block in BLOCKS].count("README.md") == 2
    assert {block.server for block in BLOCKS} == {"en-de", "a language model", "a classifier", "", None}
