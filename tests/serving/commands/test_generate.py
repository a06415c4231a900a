"""`beamline generate` and `beamline score`, against a server that echoes."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import Any

import pytest

from beamline.serving.cli import main
from beamline.serving.commands import generate, score
from tests.serving.fake_lm import GatedEngine, serving

COMMANDS: dict[str, Any] = {"generate": lambda: generate, "score": lambda: score}


async def ask(engine: GatedEngine, name: str, *arguments: str) -> int:
    async with serving(engine) as server:
        return await asyncio.to_thread(main, [name, "--target", server.grpc_address, *arguments], COMMANDS)


async def test_an_answer_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(GatedEngine(), "generate", "Hello wörld", "--max-tokens", "7", "--temperature", "0.5") == 0
    assert capsys.readouterr().out == "Hello w\n"
    assert await ask(GatedEngine(), "generate", "one two", "--stop", "two", "--echo") == 0
    assert capsys.readouterr().out == "one twoone \n"


async def test_several_answers_stand_one_behind_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(GatedEngine(), "generate", "abc", "-n", "2", "--temperature", "1", "--seed", "3") == 0
    assert capsys.readouterr().out == "--- 1 of 2\nabc\n--- 2 of 2\nabc\n"


async def test_a_talk_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    assert await ask(GatedEngine(), "generate", "--chat", "--system", "Be kind.") == 0
    assert capsys.readouterr().out == "<system>Be kind.<user>Hi<assistant>\n"


async def test_tokens_appear_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed while the device stands still after a few steps."""
    engine = GatedEngine(gate=True)
    printed: list[str] = []
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            printed.append(text)
            loop.call_soon_threadsafe(seen.set)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Out())
    running = asyncio.ensure_future(ask(engine, "generate", "abc"))
    engine.permit(2)
    while "".join(printed) != "ab":
        await asyncio.wait_for(seen.wait(), 60)
        seen.clear()
    assert not running.done()
    engine.open()
    assert await running == 0
    assert "".join(printed) == "abc\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--system", "y"], "--system needs --chat"),
        (["x", "--max-tokens", "-1"], "max_tokens is -1; it must be a whole number from 1 on"),
        (["x", "--top-p", "2"], "top_p is 2; it must be above 0, up to 1 (off)"),
    ],
)
async def test_a_mistake_is_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(GatedEngine(), "generate", *arguments) == 2
    assert sentence in capsys.readouterr().err


async def test_texts_are_scored_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f"line {number}\n" for number in range(40))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert await ask(GatedEngine(), "score") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[2] for line in out] == lines.splitlines()
    assert out[0] == "-0.6000\t1.1052\tline 0"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\n  \nthree\n" + b"\n" * 40)))
    assert await ask(GatedEngine(), "score") == 0
    out = capsys.readouterr().out.split("\n")
    assert [line.split("\t")[-1] for line in out] == ["one", "", "", "three", *[""] * 41]
    assert await ask(GatedEngine("translate"), "score", "--source", "q", "--tokens", "ab") == 0
    assert capsys.readouterr().out.splitlines() == [
        "-0.3000\t1.1052\tab",
        "  -0.1000\ta",
        "  -0.1000\tb",
        "  -0.1000\t</s>",
    ]
