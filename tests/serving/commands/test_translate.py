from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from beamline.errors import BeamlineError, Overloaded, Unavailable
from beamline.serving.cli import main
from beamline.serving.commands import models, translate
from beamline.serving.commands.connection import connection_of
from beamline.serving.commands.lines import two_at_a_time
from tests.serving.doubles import EngineDouble, running, small_manifest
from tests.support.processes import ROOT


async def ask(engine: EngineDouble, *arguments: str) -> int:
    async with running(engine) as server:
        line = ["translate", "--target", server.grpc_address, *arguments]
        return await asyncio.to_thread(main, line, {"translate": lambda: translate})


async def test_texts_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(EngineDouble(), "Hello there. Bye.", "zwei") == 0
    out, err = capsys.readouterr()
    assert out == "Hello there. Bye.\nzwei\n"
    assert err == ""


async def test_lines_from_a_file_stay_in_order_and_blank_ones_stay_blank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["" if number % 7 == 0 else f"line {number} ü" for number in range(200)]
    (tmp_path / "in").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert await ask(EngineDouble(), "--file", str(tmp_path / "in"), "--progress") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == lines
    assert "200 lines" in err


async def test_lines_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("eins\n\nzwei ß".encode())))
    assert await ask(EngineDouble()) == 0
    assert capsys.readouterr().out == "eins\n\nzwei ß\n"


async def test_scores_and_hypotheses(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(EngineDouble(), "--scores", "--nbest", "2", "--beam", "3", "One is. Two.") == 0
    assert capsys.readouterr().out == "-1.0000\tOne is. Two.\n-2.0000\tOne is. Two.\n"


async def test_languages_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = small_manifest().model_copy(update={"source_languages": ("en",), "target_languages": ("de",)})
    both = ["--source-language", "en", "--target-language"]
    assert await ask(EngineDouble(manifest), *both, "de", "a") == 0
    assert capsys.readouterr().out == "a\n"
    engine = EngineDouble(manifest)
    assert await ask(engine, *both, "fr", "a") == 2
    assert "target_language is 'fr'" in capsys.readouterr().err
    assert engine.submitted == []
    assert await ask(EngineDouble(manifest), "--source-language", "fr", "a") == 2
    assert "source_language is 'fr'" in capsys.readouterr().err


async def test_samples(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "7"]
    engine = EngineDouble()
    assert await ask(engine, *sampling, "--nbest", "3", "One is. Two.") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    (request,) = engine.submitted
    options = request.options
    assert options is not None
    assert (options.beam_size, options.num_hypotheses, options.top_k, options.seed) == (3, 3, 9, 7)
    assert (options.temperature, options.top_p, options.min_p) == pytest.approx((0.7, 0.9, 0.01))
    assert await ask(EngineDouble(), "--temperature", "1", "--beam", "2", "a") == 2
    assert "a beam search does not sample" in capsys.readouterr().err


async def test_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    engine = EngineDouble()
    search = ["--length-penalty", "0.5", "--max-length", "9", "--no-repeat-ngram-size", "3", "--stop", "never"]
    assert await ask(engine, "--beam-size", "2", *search, "a") == 0
    options = engine.submitted[0].options
    assert options is not None
    assert (options.beam_size, options.length_penalty, options.max_length) == (2, 0.5, 9)
    assert options.no_repeat_ngram_size == 3


async def test_a_refusal_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(EngineDouble(), "--beam", "9", "a") == 2
    assert capsys.readouterr().err == "beamline: beam_size is 9; this model allows 1 to 8\n"


def test_no_server_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--target", "127.0.0.1:1", "a"], {"translate": lambda: translate}) == 2
    assert capsys.readouterr().err.startswith(
        "beamline: nothing answers at 127.0.0.1:1: start a server with `beamline serve`"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--file", "/nowhere", "a"], "give texts or --file, not both"),
        (["--file", "/nowhere"], "/nowhere can't be read: No such file or directory"),
        (["--beam", "0", "a"], "--beam is 0; it must be at least 1"),
        (["a", ""], "a TEXT is empty; give words"),
        ([" "], "a TEXT is empty; give words"),
        (["--nbest", "-1", "a"], "--nbest is -1; it must be at least 1"),
        (["--repo", str(ROOT / "docs"), "a"], "docs holds no models that can be loaded ("),
        (["--tls-cert", "a", "--tls-key", "b", "a"], "need --tls or --tls-ca as well"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", *arguments], {"translate": lambda: translate}) == 2
    assert sentence in capsys.readouterr().err


def test_input_that_is_not_utf8_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(b"\xff\n")
    assert main(["translate", "--file", str(tmp_path / "in")], {"translate": lambda: translate}) == 2
    assert "not UTF-8" in capsys.readouterr().err


def options(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    translate.add_arguments(parser)
    return translate.options_of(parser.parse_args(arguments))


def test_what_is_not_given_is_left_to_the_model() -> None:
    assert options() == {"split_sentences": True}
    assert options("--model", "m", "--version", "3") == {"split_sentences": True, "model": "m", "version": "3"}


def test_splitting_is_off_where_it_makes_no_sense() -> None:
    assert not options("--no-split")["split_sentences"]
    assert not options("--nbest", "2")["split_sentences"]
    assert options("--nbest", "1")["split_sentences"]
    assert options("--target-prefix", "Die") == {"split_sentences": False, "target_prefix": "Die"}


def test_the_public_authorities_are_trusted_where_that_is_said() -> None:
    parser = argparse.ArgumentParser()
    translate.add_arguments(parser)
    assert connection_of(parser.parse_args([]))["tls"] is None
    assert connection_of(parser.parse_args(["--tls"]))["tls"] is True
    assert connection_of(parser.parse_args(["--tls", "--tls-ca", "ca.pem"]))["tls"] == Path("ca.pem")


@pytest.mark.parametrize("wrong", ["0", "soon", "inf"])
def test_a_timeout_is_seconds(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["translate", "--timeout", wrong, "a"], {"translate": lambda: translate})
    assert f"it is {wrong!r}; it must be seconds, more than 0" in capsys.readouterr().err


async def test_a_full_queue_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    engine = EngineDouble(capacity=0)
    task = asyncio.create_task(ask(engine, "a"))
    await engine.until(lambda: engine.refused > 0)
    engine.capacity = 10
    assert await task == 0
    assert capsys.readouterr().out == "a\n"


async def test_who_waits_in_a_pipe_has_an_answer_before_the_next_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EngineDouble()
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading, encoding="utf-8"))
    task = asyncio.create_task(ask(engine))
    seen = ""
    for line in ("eins\n", "zw", "ei\r\n"):
        os.write(writing, line.encode())
        if line.endswith("\n"):
            async with asyncio.timeout(60):
                while not (new := capsys.readouterr().out):
                    await asyncio.sleep(0.01)
            seen += new
    os.close(writing)
    assert await task == 0
    assert seen == "eins\nzwei\n"


def test_blocks_are_asked_about_two_at_a_time_and_answered_in_order() -> None:
    both = threading.Barrier(2, timeout=60)

    def ask(texts: list[str]) -> list[str]:
        both.wait()  # passes only where another block is asked about meanwhile
        return [text.upper() for text in texts]

    answers = list(two_at_a_time(ask, [["a", ""], ["b"], ["c"], ["d"]]))
    assert answers == [("a", "A"), ("", None), ("b", "B"), ("c", "C"), ("d", "D")]


@pytest.mark.parametrize("kind", [Overloaded, Unavailable])
def test_what_is_no_lines_fault_is_raised(kind: type[BeamlineError]) -> None:
    with pytest.raises(kind):
        list(two_at_a_time(lambda texts: [kind("down") for _ in texts], [["a"]]))


def test_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    commands: Any = {"translate": lambda: translate}
    repository = str(ROOT / "model_repo")
    assert main(["translate", "--repo", repository, "Open."], commands) == 0
    assert capsys.readouterr().out == "Öffnen Sie.\n"
    prefixed = ["translate", "--repo", repository, "--target-prefix", "Die", "--timeout", "60", "Save the file."]
    assert main(prefixed, commands) == 0
    assert capsys.readouterr().out.startswith("Die ")
    assert main(["translate", "--repo", repository, "--model", "en-fr", "Open."], commands) == 2
    assert "beside it there is en-de, en-de-gru" in capsys.readouterr().err
    assert main(["translate", "--repo", repository, "--target", "a:1", "Open."], commands) == 2
    assert "give --target or --repo, not both" in capsys.readouterr().err


async def test_the_server_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(EngineDouble()) as server:
        monkeypatch.setenv("BEAMLINE_TARGET", server.grpc_address)
        assert await asyncio.to_thread(main, ["translate", "eins"], {"translate": lambda: translate}) == 0
        assert await asyncio.to_thread(main, ["models"], {"models": lambda: models}) == 0
    assert capsys.readouterr().out == "eins\nname  version  state  reason\nfake  1        READY\n"


async def test_the_http_port_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(EngineDouble(), http_port=0) as server:
        line = ["translate", "--target", str(server.http_address), "a"]
        assert await asyncio.to_thread(main, line, {"translate": lambda: translate}) == 2
    assert "that is an HTTP port" in capsys.readouterr().err


async def test_a_line_that_is_refused_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(f"eins\n{'x' * 1000}\ndrei\n", encoding="utf-8")
    assert await ask(EngineDouble(), "--file", str(tmp_path / "in"), "--no-split") == 1
    out, err = capsys.readouterr()
    assert out == "eins\n\ndrei\n"
    assert err.startswith("line 2: ")
    assert "inputs[0]" not in err
